"""Roles against tables that were written by hand, for five families that keep their layers in five ways."""

from __future__ import annotations

import pytest
from tests.models.families import build

from unmask.models import adapt
from unmask.models.linear import Role

# Query, key and value with their columns, output projection, MLP in, gate, MLP out; names below block 1.
BY_HAND = {
    "GPT2": (
        "h.1",
        ("attn.c_attn", range(64)),
        ("attn.c_attn", range(64, 128)),
        ("attn.c_attn", range(128, 192)),
        ("attn.c_proj", "mlp.c_fc", None, "mlp.c_proj"),
    ),
    "Gemma3": (
        "layers.1",
        ("self_attn.q_proj", None),
        ("self_attn.k_proj", None),
        ("self_attn.v_proj", None),
        ("self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"),
    ),
    "GPTNeoX": (
        "layers.1",
        ("attention.query_key_value", tuple(h * 48 + i for h in range(4) for i in range(16))),
        ("attention.query_key_value", tuple(h * 48 + 16 + i for h in range(4) for i in range(16))),
        ("attention.query_key_value", tuple(h * 48 + 32 + i for h in range(4) for i in range(16))),
        ("attention.dense", "mlp.dense_h_to_4h", None, "mlp.dense_4h_to_h"),
    ),
    "Falcon": (
        "h.1",
        ("self_attention.query_key_value", range(64)),
        ("self_attention.query_key_value", range(64, 80)),
        ("self_attention.query_key_value", range(80, 96)),
        ("self_attention.dense", "mlp.dense_h_to_4h", None, "mlp.dense_4h_to_h"),
    ),
    "Bert": (
        "encoder.layer.1",
        ("attention.self.query", None),
        ("attention.self.key", None),
        ("attention.self.value", None),
        ("attention.output.dense", "intermediate.dense", None, "output.dense"),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_roles_are_those_of_the_table(name):
    model, (block, *projections, others) = adapt(build(name)), BY_HAND[name]
    for role, (module, columns) in zip((Role.QUERY, Role.KEY, Role.VALUE), projections, strict=True):
        layer = model.linear(role, 1)
        assert (layer.module, layer.columns) == (f"{block}.{module}", columns)
    for role, module in zip((Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_GATE, Role.MLP_OUT), others, strict=True):
        layer = model.linear(role, 1)
        assert (None if layer is None else layer.module) == (None if module is None else f"{block}.{module}")


@pytest.mark.parametrize(
    ("name", "attention", "mlp"),
    [
        ("GPT2", True, True),
        ("Bert", True, True),
        ("GPTJ", False, True),
        ("Gemma2", False, False),
        ("Olmo2", False, False),
    ],
)
def test_whether_the_stream_goes_round_a_sum(name, attention, mlp):
    """Behind a norm of its own, or beside the MLP, what a layer adds is not all that later rows depend on."""
    model = adapt(build(name))
    assert model.carries_all(Role.ATTENTION_OUT, 0) == attention
    assert model.carries_all(Role.MLP_OUT, 0) == mlp
