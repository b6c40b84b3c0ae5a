"""GPT-2: its variants beside transformers' own forward pass, and where queries, keys and values lie."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.models.parity import FLOAT32_PARITY, FLOAT64_PARITY, precise, random_batch, worst_error
from tests.tiny_models import gpt2_config, random_model

from unmask.models import Model, Role, adapt


@pytest.fixture(scope="module")
def wide_gpt2() -> Model:
    """GPT-2's true width and heads, two blocks."""
    config = gpt2_config(n_embd=768, n_head=12, n_layer=2, vocab_size=1000)
    return adapt(random_model(transformers.GPT2LMHeadModel, config))


def test_parity_at_gpt2s_true_width(wide_gpt2):
    assert worst_error(wide_gpt2, *random_batch(wide_gpt2, "right")) < FLOAT32_PARITY
    twin = precise(wide_gpt2)
    assert worst_error(twin, *random_batch(twin, "left")) < FLOAT64_PARITY


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"activation_function": "relu"},
        {"n_inner": 80},
    ],
)
def test_parity_of_gpt2s_variants(changes):
    model = precise(adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config(**changes))))
    assert worst_error(model, *random_batch(model, "right")) < FLOAT64_PARITY


@pytest.mark.parametrize("head", ["GPT2Model", "GPT2ForSequenceClassification"])
def test_parity_does_not_depend_on_the_head(head):
    model = precise(adapt(random_model(getattr(transformers, head), gpt2_config())))
    assert worst_error(model, *random_batch(model, "right")) < FLOAT64_PARITY


def test_the_loss_needs_no_warning(monkeypatch):
    model = adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config()))
    said = []
    monkeypatch.setattr(transformers.modeling_utils.logger, "warning_once", said.append)
    tokens = torch.tensor([[5, 6, 7]])
    output = model.hf(input_ids=tokens, labels=tokens)
    expected = torch.nn.functional.cross_entropy(output.logits[0, :-1], tokens[0, 1:])
    assert torch.allclose(output.loss, expected)
    assert said == []


def test_query_key_and_value_do_not_overlap_and_cover_the_parameter(tiny_gpt2):
    columns = [tiny_gpt2.linear(role, 1).columns for role in (Role.QUERY, Role.KEY, Role.VALUE)]
    assert columns == [range(64), range(64, 128), range(128, 192)]
    assert tiny_gpt2.parameter("h.1.attn.c_attn.weight").shape[1] == 192
