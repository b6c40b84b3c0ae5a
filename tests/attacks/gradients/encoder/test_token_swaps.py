"""Single exchanges: costs of all moves against the texts computed anew, and what a descent by moves repairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.attacks.gradients.encoder_batches import (
    BATCH,
    END,
    START,
    as_places,
    classified,
    classified_pairs,
    pair_kinds,
    problem_of,
)
from torch import Tensor

from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.problem import Problem
from unmask.attacks.gradients.encoder.token_swaps import TokenSwaps
from unmask.models import Model

quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = sorted({token for text in BATCH for token in text} - {START, END})
words = st.sampled_from(WORDS)
PAIRS = [(START, 17, 99, END, 250, END), (START, 400, 3, END, 21, 33, END)]
# Roundings of float64 sums, over denominators that may have lost a digit or two to a token that was taken out.
FLOAT64, FLOAT32 = 1e-9, 1e-3


@pytest.fixture(scope="module")
def problem(tiny_bert) -> Problem:
    return problem_of(tiny_bert, classified(tiny_bert))


def probes_of(problem: Problem, num_probes: int = 24) -> Tensor:
    assert problem.output is not None
    return problem.output.span.probes(num_probes, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exchange(problem) -> TokenSwaps:
    """In float64."""
    return TokenSwaps.of(problem.places, probes_of(problem))


@torch.no_grad()
def slow_row_costs(model: Model, problem: Problem, text: Text, probes: Tensor) -> Tensor:
    """The text sent through the model's own attention, its rows probed."""
    places = torch.tensor(text)
    tokens, positions, kinds = (
        part[places][None] for part in (problem.places.token, problem.places.position, problem.places.kind)
    )
    states = model.embed(tokens, positions, kinds)
    mixed = model.mixed_values(0, states, positions, torch.ones_like(tokens, dtype=torch.bool))
    return (mixed[0] @ probes.to(mixed)).square().sum(1)


def exchanged(text: Text, position: int, place: int) -> Text:
    return (*text[:position], place, *text[position + 1 :])


def differences(one: Text, other: Text) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


# ---- costs


@quick
@given(inner=st.lists(words, max_size=5))
def test_costs_are_those_of_the_models_own_forward_pass(problem, exchange, inner):
    text = as_places(problem.places, (START, *inner, END))
    slow = slow_row_costs(problem.precise, problem, text, probes_of(problem))
    torch.testing.assert_close(exchange.row_costs(text), slow, atol=1e-12, rtol=FLOAT64)
    assert exchange.cost(text) == pytest.approx(float(slow.mean()), rel=FLOAT64, abs=1e-12)


@pytest.mark.parametrize("text", BATCH)
def test_texts_of_the_batch_cost_nothing(problem, exchange, text):
    wrong = as_places(problem.places, (START, *reversed(text[1:-1]), END))
    places = as_places(problem.places, text)
    assert exchange.cost(places) < 1e-8 * exchange.cost(wrong)  # squares of float32's 1e-5


@quick
@given(inner=st.lists(words, min_size=1, max_size=5), data=st.data())
def test_moves_cost_what_the_exchanged_texts_cost(problem, exchange, inner, data):
    text = as_places(problem.places, (START, *inner, END))
    position = data.draw(st.integers(1, len(inner)))
    candidates, costs = exchange.moves(text, position)
    assert sorted(problem.places.token[candidates].tolist()) == WORDS
    slow = [exchange.cost(exchanged(text, position, place)) for place in candidates.tolist()]
    assert costs.tolist() == pytest.approx(slow, rel=FLOAT64, abs=1e-12)


@quick
@given(inner=st.lists(words, min_size=1, max_size=5), data=st.data())
def test_moves_in_float32_cost_nearly_the_same(problem, exchange, inner, data):
    narrow = TokenSwaps.of(problem.places, probes_of(problem).float())
    text = as_places(problem.places, (START, *inner, END))
    position = data.draw(st.integers(1, len(inner)))
    scale = exchange.cost(text) + 1e-3
    assert narrow.moves(text, position)[1].tolist() == pytest.approx(
        exchange.moves(text, position)[1].tolist(), rel=FLOAT32, abs=FLOAT32 * scale
    )


def sharpened(model: Model, factor: float) -> Model:
    """Attention as sharp as in trained heads: all queries of block 0 are longer by a factor."""
    twin = model.to()
    attention = twin.body.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.query.weight *= factor
        attention.query.bias *= factor
    return twin


@pytest.mark.parametrize("factor", [4.0, 16.0])
def test_moves_of_sharp_attention_in_float32(tiny_bert, factor):
    """A row that looks at one token alone: with that token taken out, what is left must not drown in rounding."""
    model = sharpened(tiny_bert, factor)
    problem = problem_of(model, classified(model))
    probes = probes_of(problem)
    narrow = TokenSwaps.of(problem.places, probes.float())
    text = as_places(problem.places, BATCH[1])
    for position in range(1, len(text) - 1):
        candidates, costs = narrow.moves(text, position)
        slow = [
            float(slow_row_costs(problem.precise, problem, exchanged(text, position, place), probes).mean())
            for place in candidates.tolist()
        ]
        assert costs.tolist() == pytest.approx(slow, rel=1e-2, abs=1e-2 * max(slow))


def test_costs_do_not_depend_on_other_texts_tried_before(problem, exchange):
    text = as_places(problem.places, BATCH[0])
    before = exchange.cost(text)
    exchange.moves(text, 1)
    exchange.improve(as_places(problem.places, BATCH[1]), 2)
    assert exchange.cost(text) == before


# ---- what moves repair


@pytest.mark.parametrize("text", BATCH)
def test_any_single_wrong_token_is_repaired(problem, exchange, text):
    """The text is one move away and costs nothing, so the best of all moves leads there."""
    places = as_places(problem.places, text)
    for position in range(1, len(text) - 1):
        for token in WORDS:
            wrong = exchanged(places, position, as_places(problem.places, (START,) * position + (token,))[-1])
            found, cost = exchange.improve(wrong, max_sweeps=6)
            assert found == places
            assert cost == pytest.approx(exchange.cost(places), rel=1e-2, abs=1e-9)


@pytest.mark.parametrize("text", BATCH)
def test_most_pairs_of_wrong_tokens_are_repaired(problem, exchange, text):
    """Moves have local minima; the best move first repairs three of four here."""
    places = as_places(problem.places, text)
    num_repaired = num_tried = 0
    for first in range(1, len(text) - 2):
        for one, other in [(WORDS[0], WORDS[1]), (WORDS[-1], WORDS[2]), (WORDS[3], WORDS[3])]:
            wrong = as_places(problem.places, (*text[:first], one, other, *text[first + 2 :]))
            num_repaired += exchange.improve(wrong, max_sweeps=6)[0] == places
            num_tried += 1
    assert num_repaired > 0.5 * num_tried


@quick
@given(inner=st.lists(words, max_size=5), max_sweeps=st.integers(0, 3))
def test_moves_never_raise_the_cost_and_keep_the_frame(problem, exchange, inner, max_sweeps):
    text = as_places(problem.places, (START, *inner, END))
    found, cost = exchange.improve(text, max_sweeps)
    assert cost <= exchange.cost(text)
    assert cost == pytest.approx(exchange.cost(found), rel=FLOAT64, abs=1e-12)
    tokens = problem.places.tokens_of(found)
    assert (len(tokens), tokens[0], tokens[-1]) == (len(text), START, END)
    assert not {START, END} & set(tokens[1:-1])
    if max_sweeps == 0:
        assert found == text


def test_a_text_that_no_move_betters_stays(problem, exchange):
    for text in BATCH:
        places = as_places(problem.places, text)
        assert exchange.improve(places, max_sweeps=6)[0] == places


# ---- the runner-up


@pytest.mark.parametrize("text", BATCH)
def test_the_runner_up_is_the_best_of_all_texts_that_differ_in_one_token(problem, exchange, text):
    places = as_places(problem.places, text)
    other = exchange.runner_up(places)
    assert other is not None
    assert differences(places, other) == 1
    everyone = [
        exchanged(places, position, place)
        for position in range(1, len(text) - 1)
        for place in problem.places.alternatives(places[position]).tolist()
        if place != places[position]
    ]
    assert exchange.cost(other) == pytest.approx(min(map(exchange.cost, everyone)), rel=FLOAT64)


def test_a_text_of_frame_tokens_has_no_runner_up(problem, exchange):
    assert exchange.runner_up(as_places(problem.places, (START, END))) is None


def test_a_batch_of_one_word_has_no_runner_up(tiny_bert):
    """Nothing else could stand there."""
    problem = problem_of(tiny_bert, classified(tiny_bert, [(START, 17, END)]))
    exchange = TokenSwaps.of(problem.places, probes_of(problem))
    text = as_places(problem.places, (START, 17, END))
    assert exchange.runner_up(text) in (None, text)
    assert exchange.improve(text, 3)[0] == text


# ---- pairs


def test_the_token_between_two_texts_of_a_pair_stays(tiny_bert):
    problem = problem_of(tiny_bert, classified_pairs(tiny_bert, PAIRS))
    exchange = TokenSwaps.of(problem.places, probes_of(problem))
    for text in PAIRS:
        places = as_places(problem.places, text, pair_kinds(text))
        slow = slow_row_costs(problem.precise, problem, places, probes_of(problem))
        torch.testing.assert_close(exchange.row_costs(places), slow, atol=1e-12, rtol=FLOAT64)
        wrong = as_places(problem.places, (text[0], 99 if text[1] == 17 else 17, *text[2:]), pair_kinds(text))
        assert exchange.improve(wrong, 4)[0] == places
        other = exchange.runner_up(places)
        assert other is not None
        assert differences(places, other) == 1
        assert problem.places.kind[list(other)].tolist() == list(pair_kinds(text))
        assert problem.places.tokens_of(other).count(END) == 2
