"""A block that its parts do not make up is named; others are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.models.families import build

from unmask.models import Model
from unmask.models.check_blocks import check_blocks
from unmask.models.layout import BlockPlace, ask_model
from unmask.models.parts import find_body
from unmask.models.wiring import Sum


def problems(name: str, change: Callable[[BlockPlace], BlockPlace] = lambda place: place) -> list[str]:
    """The problem of each of two blocks, where what was found of block 1 is changed before the check."""
    hf = build(name)
    layout, passes = ask_model(hf, find_body(hf))
    blocks = (layout.blocks[0], change(layout.blocks[1]))
    model = Model(hf, layout=replace(layout, blocks=blocks))
    return [place.problem for place in check_blocks(model, passes).blocks]


def scale_scores(place: BlockPlace) -> BlockPlace:
    return replace(place, scores=replace(place.scores, scale=place.scores.scale * 1.01))


def scale_output(place: BlockPlace) -> BlockPlace:
    name, factor = next(iter(place.layout.output.factors.items()))
    output = Sum({**place.layout.output.factors, name: factor * 1.01})
    return replace(place, layout=replace(place.layout, output=output))


def change_layout(**changes: object) -> Callable[[BlockPlace], BlockPlace]:
    return lambda place: replace(place, layout=replace(place.layout, **changes))


CHANGES = {
    "scores": (scale_scores, "what comes out differs by"),
    "output": (scale_output, "what comes out differs by"),
    "no scores": (lambda place: replace(place, scores=None), "more than scaled products of queries and keys"),
    "no attention": (change_layout(attention=None), "no module makes queries, keys and values"),
    "no sum": (change_layout(output=None), "no sum of the stream, attention and MLP"),
    "a missing module": (change_layout(attention=("nowhere", 0)), "AttributeError: "),
}


@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_a_block_with_other_parts_is_named(name, change, why):
    first, second = problems(name, change)
    assert first == ""
    assert second.startswith("block 1 cannot be computed from the parts that were found: ")
    assert why in second


@pytest.mark.parametrize("name", ["Llama", "Bert", "Gemma2", "GptOss", "Bloom"])
def test_untouched_blocks_have_no_problem(name):
    assert problems(name) == ["", ""]


def test_what_positions_add_must_not_be_left_out():
    first, second = problems("Bloom", lambda place: replace(place, scores=replace(place.scores, has_bias=False)))
    assert first == ""
    assert "what comes out differs by" in second


def test_half_precision_is_no_problem():
    assert Model(build("Llama").to(torch.float16)).problem == ""
