"""The token filter: against a full test of every token at every position, on true spans and on false ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiny_models import VOCAB

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates, filter_tokens, merge_equal
from unmask.linalg.gap import Gap
from unmask.linalg.subspace import Span, column_span
from unmask.models import Model, adapt

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
# Rows in float32 are 1e-7 to 1e-6 outside their own span. Tokens that do not occur are 0.1 away; where positions are
# learned, a word of the batch at the position of another comes as near as 7e-4, as token + position is a sum.
IN_SPAN = 1e-5


def span_of(model: Model, texts: Sequence[Sequence[int]]) -> Span:
    """The span of a batch's first inputs, from a random gradient that has them as its rows: G = XᵀD."""
    rows = torch.cat([model.first_input(torch.tensor(text), torch.arange(len(text))) for text in texts]).detach()
    arriving = torch.randn(len(rows), 2 * model.width, generator=torch.Generator().manual_seed(1))
    return column_span(rows.double().T @ arriving.double())


def run(model: Model, span: Span, seed: int = 0, num_probes: int = 32) -> Candidates:
    return filter_tokens(model, span, num_probes=num_probes, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def full_test(model: Model, span: Span, position: int) -> set[int]:
    """Every token of the vocabulary by its float64 distance, no probes, no shortlist."""
    everyone = torch.arange(model.vocab_size)
    distances = span.distance(model.first_input(everyone, torch.full_like(everyone, position)))
    return set((distances < IN_SPAN).nonzero()[:, 0].tolist())


def test_it_finds_what_a_full_test_of_every_token_finds(tiny):
    span = span_of(tiny, TEXTS)
    candidates = run(tiny, span)
    longest = max(map(len, TEXTS))
    for position in range(longest + 1) if tiny.learned_positions else [0]:
        assert set(candidates.at(position).tolist()) == full_test(tiny, span, position)


def test_every_token_of_the_batch_is_found_where_it_stands(tiny):
    candidates = run(tiny, span_of(tiny, TEXTS))
    for text in TEXTS:
        for position, token in enumerate(text):
            assert token in candidates.at(position).tolist()
    assert candidates.tokens == {token for text in TEXTS for token in text}
    # At the least from 1e-7 to 7e-4, see IN_SPAN; a decade less for other machines' rounding.
    assert candidates.gap.decades > 2.5


def test_rotary_models_have_one_set_for_every_position(tiny_llama):
    candidates = run(tiny_llama, span_of(tiny_llama, TEXTS))
    assert set(candidates.by_position) == {-1}
    assert torch.equal(candidates.at(0), candidates.at(1000))
    assert candidates.num_tested == VOCAB


def test_learned_positions_are_tested_up_to_the_longest_text(tiny_gpt2):
    candidates = run(tiny_gpt2, span_of(tiny_gpt2, TEXTS))
    longest = max(map(len, TEXTS))
    assert sorted(candidates.by_position) == list(range(longest))
    assert len(candidates.at(longest)) == 0
    assert candidates.num_tested == VOCAB * (longest + 1)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), min_size=1, max_size=5))
def test_no_batch_below_the_width_loses_a_token(tiny_llama, tiny_gpt2, texts):
    for model in (tiny_llama, tiny_gpt2):
        tokens = run(model, span_of(model, texts)).tokens
        words = {token for text in texts for token in text}
        # A rotary model has one vector a token; sums of token and position may bring in further words of GPT-2.
        assert tokens == words if model is tiny_llama else tokens >= words


@pytest.mark.parametrize("num_probes", [2, 8, 63])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_probes_only_save_work(tiny_llama, num_probes, seed):
    span = span_of(tiny_llama, TEXTS)
    assert run(tiny_llama, span, seed, num_probes).tokens == run(tiny_llama, span).tokens


@pytest.mark.parametrize("rank", [1, 10, 30, 60])
def test_a_random_span_holds_no_token(tiny, rank):
    noise = torch.randn(tiny.width, rank, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    candidates = run(tiny, column_span(noise @ noise.T))
    assert not candidates.tokens or candidates.gap.decades < 1


def test_candidates_at_a_position_that_nobody_filled_are_none():
    candidates = Candidates({0: torch.tensor([3, 5]), 1: torch.tensor([5])}, Gap(0.0, 1.0), 10)
    assert candidates.at(0).tolist() == [3, 5]
    assert candidates.at(7).tolist() == []
    assert candidates.tokens == {3, 5}


def test_a_token_that_passes_beside_one_of_the_batch_is_of_its_class(tiny_llama):
    """Of a difference of two rows only a part lies outside of a nearly full span: so far apart they may both pass."""
    rows = tiny_llama.parameter(tiny_llama.token_embedding).detach()
    other = rows[17] + 0.02 * rows[17].norm() * torch.nn.functional.normalize(rows[99], dim=0)
    near = adapt(tiny_llama.to().hf)
    with torch.no_grad():
        near.parameter(near.token_embedding)[250] = other
    everyone = {-1: torch.tensor([5, 17, 250])}
    alone = Candidates(everyone, Gap(1e-3, 1e-2), 500)
    assert merge_equal(alone, near, told_apart=False).classes == ()
    assert merge_equal(replace(alone, reach=0.05), near, told_apart=False).classes == ((17, 250),)
    assert merge_equal(replace(alone, reach=0.05), near, told_apart=True).equal == {}


@pytest.mark.parametrize("rank", [10, 60, 63])
def test_the_fuller_the_span_the_farther_it_reaches(tiny_llama, rank):
    basis = torch.linalg.qr(torch.randn(64, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    candidates = run(tiny_llama, Span(basis, torch.ones(rank), 64, 9.0, 0.0))
    assert candidates.reach == pytest.approx(4 * candidates.gap.threshold * (64 / (64 - rank)) ** 0.5)
