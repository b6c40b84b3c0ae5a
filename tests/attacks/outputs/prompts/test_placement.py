"""Positions show in keys, not in values or embeddings of rotary models; rows tell of what they depend on alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from tests.models.families import build
from tests.tiny_models import llama_sizes, random_model

from unmask import recover_text
from unmask.attacks.outputs.prompts.placement import shows_positions
from unmask.attacks.outputs.prompts.seen_text import ReadText, ReadToken
from unmask.models import adapt
from unmask.models.readouts import STREAM, CacheReadout
from unmask.proof.binding import reach_of_rows
from unmask.protocols import observe_cache, observe_hidden
from unmask.recovery import Status

TOKENS = (5, 17, 99)
KEYS, VALUES = CacheReadout(0, (0,), True, False), CacheReadout(0, (0,), False, True)


def text_of(tolerance: float = 1e-4) -> ReadText:
    return ReadText(tuple(ReadToken(token, True, 0.0, tolerance) for token in TOKENS), len(TOKENS), 0.0, 0, 0)


@pytest.mark.parametrize(
    ("name", "readout", "shows"),
    [
        ("tiny_llama", KEYS, True),
        ("tiny_llama", VALUES, False),
        ("tiny_llama", STREAM, False),
        ("tiny_gpt2", KEYS, True),
        ("tiny_gpt2", VALUES, True),
        ("tiny_gpt2", STREAM, True),
    ],
)
def test_it_is_measured(request, name, readout, shows):
    model = request.getfixturevalue(name)
    for position in (0, 3, model.max_positions - len(TOKENS)):
        assert shows_positions(text_of(), model, readout, 0, position) is shows


def test_positions_that_are_added_to_scores_show_in_nothing():
    model = adapt(build("Bloom"))
    assert not shows_positions(text_of(), model, KEYS, 0, 0)


def test_behind_a_block_the_order_is_part_of_the_proof(tiny_llama):
    assert shows_positions(text_of(), tiny_llama, CacheReadout(1, (0,), False, True), 1, 0)


def test_what_rounding_hides_does_not_show(tiny_llama):
    assert not shows_positions(text_of(tolerance=1.0), tiny_llama, KEYS, 0, 0)


@pytest.mark.parametrize(
    ("name", "reached"),
    [("Llama", [1, 9, 9]), ("Gemma3 with a window", [1, 4, 9]), ("GPTNeo with a window", [1, 9, 9])],
)
def test_a_row_depends_on_what_windows_let_through(name, reached):
    model = adapt(build(name))
    assert [reach_of_rows(model, num_blocks, 9) for num_blocks in range(3)] == reached


def test_a_row_depends_on_more_behind_every_window():
    config = transformers.MistralConfig(**llama_sizes(sliding_window=4))
    model = adapt(random_model(transformers.MistralForCausalLM, config))
    assert [reach_of_rows(model, num_blocks, 20) for num_blocks in range(4)] == [1, 4, 7, 10]
    assert reach_of_rows(model, 3, 6) == 6


def test_a_state_of_an_encoder_depends_on_what_windows_let_through():
    model = adapt(build("ModernBert with a window"))  # every third block sees all
    assert [reach_of_rows(model, num_blocks, 40) for num_blocks in range(5)] == [1, 40, 40, 40, 40]


@pytest.mark.parametrize("observe", [observe_hidden, observe_cache])
def test_rows_of_two_texts_that_share_a_window_are_no_text(observe):
    """They agree with the rows of a text that nobody wrote; of states, those between which rows are missing do too."""
    model = adapt(build("Gemma3 with a window"))
    same, other = [99, 250, 8, 400], [31, 44, 71, 23]
    texts = [[5, 17, *same, *other, 5, 17, *same, *other], [62, 63, *same, *range(70, 80), *other]]
    evidence = observe(model, texts, layer=1)
    parts = {"states": evidence.states} if observe is observe_hidden else evidence.parts
    spliced = {name: torch.cat([part[:1, :6], part[1:, 6:]], 1) for name, part in parts.items()}
    cut = {name: torch.cat([part[:1, :6], part[:1, 16:]], 1) for name, part in parts.items()}
    read = {(*texts[0][:6], *texts[1][6:]): spliced, tuple(texts[0]): {name: part[:1] for name, part in parts.items()}}
    for tokens, seen in (read | ({(*texts[0][:6], *other): cut} if "states" in parts else {})).items():
        recovery = recover_text(replace(evidence, mask=evidence.mask[:1, : len(tokens)], **seen), model)
        assert recovery.status is Status.PARTIAL, recovery.reason
        assert not recovery.value.certain
        assert [text.tokens for text in recovery.value.texts] == [tokens]
        assert recovery.value.token_set == set(tokens)
        assert "no row depends on more than 4 tokens" in recovery.reason
        assert "are of one text" in recovery.certificate.claim
    for bound in [observe(model, [same], layer=1), *([observe(model, texts, layer=2)] if "states" in parts else [])]:
        assert recover_text(bound, model).status is Status.RECOVERED


def test_a_known_beginning_that_a_window_hides_is_not_borne_out():
    model = adapt(build("Gemma3 with a window"))
    text = [5, 17, 99, 250, 8, 400, 31, 44]
    for length in (4, 8):
        page = observe_cache(model, [text[:length]], layer=1, first_position=length // 2)
        recovery = recover_text(page, model, known_beginning=text[: length // 2])
        assert [each.tokens for each in recovery.value.texts] == [tuple(text[:length])]
        assert recovery.status is (Status.RECOVERED if length == 4 else Status.PARTIAL), recovery.reason
        assert len(recovery.value.certain) == (length == 4)
