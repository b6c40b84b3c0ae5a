"""Blocks as functions of rows: what positions add to scores, rows before layers, and blocks that are run whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from tests.models.families import build
from tests.models.parity import FLOAT32_PARITY, random_batch, worst_error
from tests.tiny_models import llama_sizes, random_model

from unmask.errors import UnsupportedModelError
from unmask.models import Model, adapt
from unmask.models.linear import Role
from unmask.models.record import input_of
from unmask.protocols import observe_hidden

BACK = torch.arange(20)[:, None] - torch.arange(20)  # how far each of 20 keys lies behind each query


def with_problems(model: Model) -> Model:
    blocks = tuple(replace(place, problem="not believed") for place in model.layout.blocks)
    return Model(model.hf, layout=replace(model.layout, blocks=blocks))


def test_scores_that_are_not_known_are_refused_by_name():
    model = adapt(build("Bert"))
    blocks = tuple(replace(place, scores=None) for place in model.layout.blocks)
    with pytest.raises(UnsupportedModelError, match="attention of block 0"):
        observe_hidden(Model(model.hf, layout=replace(model.layout, blocks=blocks)), [[5, 6, 7]], site="attention")


@pytest.mark.parametrize("name", ["Llama", "Bert", "Gemma3 with a window", "Bloom"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_blocks_with_a_problem_are_run_whole(name, side):
    model = with_problems(adapt(build(name)))
    tokens, mask = random_batch(model, side)
    every_second = 2 * torch.arange(tokens.shape[1]).expand_as(tokens) if model.layout.takes_positions else None
    assert all(worst_error(model, tokens, mask, each) < FLOAT32_PARITY for each in (None, every_second))


@pytest.mark.parametrize("name", ["Qwen3Next", "DebertaV2 with relative positions"])
def test_states_of_a_model_with_a_real_problem(name):
    model = adapt(build(name))
    assert model.problem
    assert worst_error(model, *random_batch(model, "right")) < FLOAT32_PARITY


def test_alibi_falls_with_the_distance(tiny_llama):
    assert tiny_llama.score_bias(1, 20) is None
    bias = adapt(build("Mpt")).score_bias(1, 20)
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / 4) for head in range(4)])[:, None]
    torch.testing.assert_close(bias[:, BACK >= 0], -slopes * BACK[BACK >= 0], atol=1e-5, rtol=1e-5)
    assert float(bias[:, BACK < 0].max()) < -1e30


@pytest.mark.parametrize(("name", "block", "full"), [("GPTNeo with a window", 1, 0), ("Gemma3 with a window", 0, 1)])
def test_keys_outside_of_a_window_are_hidden(name, block, full):
    model = adapt(build(name))
    bias, inside = model.score_bias(block, 20), (BACK >= 0) & (BACK < 4)
    assert float(bias[:, inside].abs().max()) < 1e-4
    assert float(bias[:, ~inside].max()) < -1e30
    assert float(model.score_bias(full, 20)[:, BACK >= 0].abs().max()) < 1e-4


def test_a_window_that_short_texts_do_not_fill():
    config = transformers.MistralConfig(**llama_sizes(sliding_window=10))
    model = adapt(random_model(transformers.MistralForCausalLM, config))
    batch = random_batch(model, "right", lengths=(40, 9))
    assert not model.scores(0).has_bias
    assert worst_error(model, *batch) < FLOAT32_PARITY
    model._biases = {block: torch.zeros(4, 64, 64) for block in range(model.num_blocks)}
    assert worst_error(model, *batch) > 100 * FLOAT32_PARITY


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Mpt", "GptOss", "Gemma2"])
def test_a_candidate_behind_a_prefix_reads_what_the_last_query_reads(name):
    model, positions = adapt(build(name)), torch.arange(6)[None]
    states = model.embed(torch.tensor([[5, 6, 7, 8, 9, 10]]), positions)
    mixed = model.mixed_values(0, states, positions, torch.ones(1, 6, dtype=torch.bool))
    q, k, v = model.queries_keys_values(0, model.attention_input(0, states), positions)
    behind = model.mix_behind(0, q[0, 5:], k[0, 5:], v[0, 5:], k[:, :5], v[:, :5])
    torch.testing.assert_close(behind[0, 0], mixed[0, 5], atol=1e-5, rtol=1e-5)
    shorter = model.mix_behind(0, q[0, 5:], k[0, 5:], v[0, 5:], k[:, :4], v[:, :4])
    assert not torch.allclose(shorter, behind, atol=1e-3)


@torch.no_grad()
def test_rows_before_the_output_and_down_projections_are_the_models_own(tiny):
    tokens, positions = torch.tensor([[11, 12, 13]]), torch.arange(3)[None]
    states = tiny.embed(tokens, positions)
    mixed = tiny.mixed_values(0, states, positions, torch.ones(1, 3, dtype=torch.bool))
    hidden = tiny.mlp_hidden(0, tiny.after_attention(0, states, mixed))
    for role, rows in ((Role.ATTENTION_OUT, mixed), (Role.MLP_OUT, hidden)):
        layer = tiny.body.get_submodule(tiny.linear(role, 0).module)
        torch.testing.assert_close(rows, input_of(layer, lambda: tiny.body(tokens)), atol=1e-5, rtol=1e-4)
