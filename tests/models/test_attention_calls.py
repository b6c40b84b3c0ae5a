"""The model's own attention module, stopped at its softmax or finished behind it, and left as it was."""

from __future__ import annotations

import pytest
import torch
from tests.models.families import build
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from unmask.models import Model, adapt
from unmask.models.attention_calls import (
    Arguments,
    KnownRows,
    block_arguments,
    finish_attention,
    module_arguments,
    read_heads,
    replace_rows,
)
from unmask.models.record import input_of, record_pass

POSITIONS = torch.tensor([0, 3, 11, 5])
ROWS = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}


def ask_attention(model: Model, positions: Tensor) -> tuple[torch.nn.Module, str, Arguments]:
    """Block 0's attention module, its argument for rows, and all that it is given at some positions."""
    blocks = list(model.body.layers)
    inputs = {"input_ids": torch.zeros_like(positions)[:, None], "position_ids": positions[:, None]}
    given = block_arguments(model.body, blocks, [None] * len(blocks), lambda: model.body(**inputs, use_cache=False))
    name, where = model.layout.blocks[0].layout.attention
    module = blocks[0].get_submodule(name)
    return module, where, module_arguments(blocks[0], module, given[0])


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_heads_are_those_of_a_llama_by_hand(kernel):
    model = adapt(build("Llama"))
    model.hf.set_attn_implementation(kernel)
    attention, where, arguments = ask_attention(model, POSITIONS)
    q, k, v = read_heads(attention, where, arguments, ROWS)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    by_hand = [layer(ROWS).unflatten(-1, (-1, 16))[:, :, None] for layer in projections]
    rotations = model.body.rotary_emb(ROWS, POSITIONS[:, None])
    expected = *apply_rotary_pos_emb(by_hand[0], by_hand[1], *rotations), by_hand[2]
    repeats = k.shape[1] // model.num_key_value_heads  # some kernels are given shared keys once for each head
    for found, wanted in zip((q, k[:, ::repeats], v[:, ::repeats]), expected, strict=True):
        torch.testing.assert_close(found, wanted[:, :, 0], **FLOAT32)
    elsewhere = read_heads(*ask_attention(model, POSITIONS + 1), ROWS)
    assert not torch.allclose(elsewhere[0], q, **FLOAT32)
    assert torch.allclose(elsewhere[2], v)


@torch.no_grad()
def test_products_of_known_rows_are_kept_unless_something_changed_them():
    model = adapt(build("Llama"))
    known = KnownRows(ROWS)
    for positions in (POSITIONS, POSITIONS + 1, POSITIONS):
        asked = ask_attention(model, positions)
        expected = read_heads(*asked, ROWS)
        for found, wanted in zip(read_heads(*asked, ROWS, known), expected, strict=True):
            assert torch.equal(found, wanted)
        assert len(known.outputs) == 3
        for output, _ in known.outputs.values():
            output.zero_()  # as a module that scales its queries in place
    other = KnownRows(ROWS)
    attention, where, arguments = ask_attention(model, POSITIONS)
    read_heads(attention, where, arguments, ROWS, other)
    calls = []
    handle = attention.q_proj.register_forward_hook(lambda *call: calls.append(call[2]))
    read_heads(attention, where, arguments, ROWS, other)
    handle.remove()
    assert calls[0] is other.outputs[id(attention.q_proj.weight)][0]


@torch.no_grad()
@pytest.mark.parametrize(("name", "behind"), [("Llama", "o_proj"), ("BitNet", "attn_sub_norm")])
def test_attention_goes_on_from_mixed_values(name, behind):
    """With the values that the module mixed in a whole text, it puts out what it put out there."""
    model, tokens = adapt(build(name)), torch.tensor([[5, 6, 7, 8, 9]])
    attention, where, arguments = ask_attention(model, POSITIONS[:1])
    mixed = input_of(attention.get_submodule(behind), lambda: model.body(tokens))[0]
    record = record_pass(model.body, attention, input_ids=tokens)
    own = next(call.output for call in record.calls if call.module is attention)[0]
    rows = model.first_input(tokens[0], torch.arange(5))
    torch.testing.assert_close(finish_attention(attention, where, arguments, rows, mixed), own, **FLOAT32)
    assert not torch.allclose(finish_attention(attention, where, arguments, rows, mixed.flip(0)), own, **FLOAT32)


def test_rows_are_replaced_by_place_or_by_name():
    assert replace_rows(((1, 2, 3), {"a": 4}), 1, ROWS) == ((1, ROWS, 3), {"a": 4})
    assert replace_rows(((1,), {"a": 4, "b": 5}), "a", ROWS) == ((1,), {"a": ROWS, "b": 5})


def test_blocks_are_as_before_even_after_an_error():
    blocks = list(build("Llama").model.layers)
    own = blocks[1].forward
    blocks[1].forward = own  # as libraries that wrap modules do

    def fail() -> None:
        assert "forward" in vars(blocks[0])
        raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        block_arguments(None, blocks, [None, None], fail)
    assert "forward" not in vars(blocks[0])
    assert vars(blocks[1]).pop("forward") is own
    with pytest.raises(TypeError):
        module_arguments(blocks[0], blocks[0].mlp, ((), {}))
    assert not blocks[0].mlp._forward_pre_hooks


@torch.no_grad()
def test_products_with_a_part_of_a_weight_are_not_kept():
    known, weight = KnownRows(ROWS), torch.nn.Parameter(torch.randn(6, ROWS.shape[1]))
    for part in (slice(0, 3), slice(3, 6)):
        assert torch.equal(known.multiply(torch.nn.functional.linear, (ROWS, weight[part]), {}), ROWS @ weight[part].T)
    assert known.outputs == {}
