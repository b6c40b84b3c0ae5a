"""Positions show in keys, not in the values or the embeddings of rotary models."""

from __future__ import annotations

import pytest
from tests.models.families import build

from unmask.attacks.outputs.prompts.placement import shows_positions
from unmask.attacks.outputs.prompts.readouts import STREAM, CacheReadout
from unmask.attacks.outputs.prompts.seen_text import ReadText, ReadToken
from unmask.models import adapt

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
