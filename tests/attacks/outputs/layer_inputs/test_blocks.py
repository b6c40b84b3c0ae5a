"""Blocks inverted row by row: exact where they are nearly the identity, honest where they have several pre-images."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.outputs.shaped_models import gpt2, llama
from tests.tiny_models import VOCAB

from unmask.attacks.outputs.block_step import BlockStep
from unmask.attacks.outputs.layer_inputs.blocks import BlockInverter, RowPreimage, RowStatus, rounding
from unmask.attacks.outputs.layer_inputs.stack import invert_stack
from unmask.models import Model

INVERTER = BlockInverter()


@torch.no_grad()
def states_of(model: Model, length: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCAB, (1, length), generator=generator)
    return [states[0] for states in model.hidden_states(tokens)]


def worst_error(rows: torch.Tensor, others: torch.Tensor) -> float:
    return float(((rows - others).norm(dim=1) / others.norm(dim=1)).max())


def assert_inverts(model: Model, tolerance: float) -> list[float]:
    """Block by block with recovered rows; the errors after each block, the last block first."""
    states = states_of(model)
    stack = invert_stack(model, states[-1], top=model.num_blocks)
    assert stack.num_exact == stack.length == len(states[-1])
    errors = [worst_error(block.states, states[block.block]) for block in stack.blocks]
    assert max(errors) < tolerance
    standings = {preimage.standing for block in stack.blocks for preimage in block.preimages}
    assert standings == {RowStatus.ISOLATED}
    # The first-order bound of the adversary covers what the comparison with the secret shows.
    assert errors[-1] < 10 * stack.amplification * stack.blocks[0].preimages[0].tolerance
    return errors


@pytest.mark.slow
def test_twelve_blocks_of_gpt2():
    errors = assert_inverts(gpt2(96, 12, 4), 1e-10)
    assert errors[-1] < 1e3 * errors[0]  # errors grow by a small factor a block


@pytest.mark.slow
def test_twelve_blocks_of_gpt2_at_its_true_size():
    assert_inverts(gpt2(768, 12, 12), 1e-10)


def test_blocks_of_llama():
    """RMSNorm of transformers computes in float32 whatever the model's precision: 1e-7 is its rounding."""
    assert_inverts(llama(96, 4), 1e-5)


def test_rounding_is_measured_not_assumed():
    for model, least, most in ((gpt2(64, 1, 4), 1e-17, 1e-13), (llama(64, 1), 1e-10, 1e-5)):
        row = states_of(model)[0][0]
        assert least < rounding(BlockStep.first(model, 0), row) < most


def test_float32_to_its_rounding():
    model = gpt2(96, 3, 4).to(dtype=torch.float32)
    states = states_of(model)
    stack = invert_stack(model, states[-1], top=3)
    assert worst_error(stack.states, states[0]) < 1e-5  # three blocks of float32, each amplifying by less than 3


def test_singular_values_are_those_of_the_jacobian():
    model = gpt2(64, 1, 4)
    states = states_of(model)
    inversion = INVERTER.invert_block(model, 0, states[1][:1])
    (preimage,) = inversion.preimages
    values = torch.linalg.svdvals(BlockStep.first(model, 0).jacobian(preimage.row))
    assert preimage.smallest_singular_value == pytest.approx(float(values[-1]), rel=1e-6)
    assert preimage.condition == pytest.approx(float(values[0] / values[-1]), rel=1e-6)


def test_standing_needs_a_residual_and_a_regular_jacobian():
    row = torch.zeros(2)
    assert RowPreimage(row, 1e-15, 1e-14, 0.5, 2.0, 1).standing is RowStatus.ISOLATED
    assert RowPreimage(row, 1e-15, 1e-14, 1e-16, 2.0, 1).standing is RowStatus.SINGULAR
    assert RowPreimage(row, 1e-15, 1e-14, 0.0, 2.0, 1).standing is RowStatus.SINGULAR
    assert RowPreimage(row, 1e-13, 1e-14, 0.5, 2.0, 1).standing is RowStatus.NOT_REACHED
    assert RowPreimage(row, float("nan"), 1e-14, 0.5, 2.0, 1).standing is RowStatus.NOT_REACHED


def test_a_text_ends_where_no_preimage_is_found():
    """An output that no row leads to from its start: the rows before it stay, none comes after it."""
    model = gpt2(64, 1, 4)
    outputs = states_of(model)[1].clone()
    outputs[3] = 0  # the start is a row without variance, where a LayerNorm's derivative is huge
    inversion = BlockInverter(max_steps=1).invert_block(model, 0, outputs)
    assert inversion.num_exact == 3
    assert len(inversion.preimages) == 4
    assert worst_error(inversion.states, states_of(model)[0][:3]) < 1e-10


def test_a_trained_block_has_wrong_preimages(smollm2):
    """Residual zero is not recovery: block 0 of SmolLM2 maps a row far from the client's to the same output."""
    model = smollm2.to(dtype=torch.float64, num_blocks=1)
    tokens = torch.tensor([smollm2.encode("The spare key")])
    with torch.no_grad():
        before, after = (states[0] for states in model.hidden_states(tokens, num_blocks=1))
    step = BlockStep.first(model, 0)
    for row in before[:2]:
        stepped = step.run(row[None])
        step = step.following(stepped.keys, stepped.values)
    preimage, _ = INVERTER.invert_row(step, after[2], after[2])
    assert preimage.standing is RowStatus.ISOLATED
    assert worst_error(preimage.row[None], before[2:3]) > 1
