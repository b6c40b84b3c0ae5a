"""A block that its parts do not make up is named; others are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from tests.models.families import build
from tests.tiny_models import llama_sizes, random_model

import unmask
from unmask.models import Model, adapt
from unmask.models.check_blocks import check_blocks
from unmask.models.layout import BlockPlace, ask_model
from unmask.models.parts import find_body
from unmask.models.wiring import Sum
from unmask.recovery import Status


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


def late_scale() -> Model:
    """Llama 4 scales queries from a position on; asking it with a few tokens does not show that."""
    sizes = {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 128, "moe_layers": []}
    late = {"floor_scale": 8, "attn_scale": 0.5, "no_rope_layers": [0, 0, 0]}
    return adapt(
        random_model(transformers.Llama4ForCausalLM, transformers.Llama4TextConfig(**llama_sizes(**sizes, **late)))
    )


def test_what_begins_behind_the_first_tokens_is_found_before_anything_is_claimed():
    model = late_scale()
    assert not model.problem
    assert "in a text of 64 tokens its states differ" in model.problem_at(10)
    texts = [tuple(range(11, 31)), (60, 61, 62)]
    recovery = unmask.recover_text(unmask.observe_gradients(model, texts), model)
    assert not recovery.value.texts
    assert "in a text of 64 tokens" in recovery.reason
    states = unmask.recover_text(unmask.observe_hidden(model, texts, layer=3), model)
    assert states.status is Status.NOT_APPLICABLE


def test_a_text_of_any_length_is_right_where_nothing_begins_late(tiny_llama):
    assert tiny_llama.problem_at(1) == tiny_llama.problem_at(30) == ""


def test_large_scores_are_no_window():
    hf = build("Llama")
    with torch.no_grad():
        for block in hf.model.layers:
            block.self_attn.q_proj.weight *= 43
    model = adapt(hf)
    assert not model.problem_at(20)
    assert not model.layout.blocks[0].scores.has_bias


def test_dropout_is_off_while_a_text_is_checked():
    model = adapt(build("GPT2"))
    model.hf.train()
    model.hf.transformer.h[0].eval()
    assert not model.problem_at(20)
    assert model.hf.training
    assert not model.hf.transformer.h[0].training
