"""One position at a time is the same block; its Jacobian is autograd's."""

from __future__ import annotations

import pytest
import torch
from torch.func import jacrev

from unmask.attacks.outputs.block_step import BlockStep, Prefix
from unmask.errors import InputError
from unmask.models import Model

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral")
TEXT = [5, 17, 99, 17, 250, 3, 8]


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest) -> Model:
    """In float64, so that what differs is a mistake and not rounding."""
    return request.getfixturevalue(request.param).to(dtype=torch.float64)


each_decoder = pytest.mark.parametrize("decoder", DECODERS, indirect=True)


@torch.no_grad()
def states_of(model: Model, tokens: list[int], num_blocks: int) -> list[torch.Tensor]:
    """The stream of one text before block 0, after it, and so on."""
    return [states[0] for states in model.hidden_states(torch.tensor([tokens]), num_blocks=num_blocks)]


def step_at(model: Model, block: int, states: torch.Tensor, position: int) -> BlockStep:
    """The block behind the first rows of a text."""
    step = BlockStep.first(model, block)
    for index in range(position):
        stepped = step.run(states[index : index + 1])
        step = step.following(stepped.keys, stepped.values)
    return step


@each_decoder
def test_position_by_position_is_the_block(decoder):
    states = states_of(decoder, TEXT, decoder.num_blocks)
    for block in range(decoder.num_blocks):
        for position in range(len(TEXT)):
            step = step_at(decoder, block, states[block], position)
            # Another order of the same sums: rounding of float64 and no more.
            torch.testing.assert_close(
                step(states[block][position : position + 1]), states[block + 1][position : position + 1]
            )


def test_position_by_position_is_the_block_of_real_weights(smollm2):
    tokens = smollm2.encode("The spare key lies under the pot beside the door.")
    states = states_of(smollm2, tokens, 3)
    for block in range(3):
        step = step_at(smollm2, block, states[block], len(tokens) - 1)
        error = (step(states[block][-1:])[0] - states[block + 1][-1]).norm() / states[block + 1][-1].norm()
        assert error < 1e-5  # float32, sums of up to 1536 terms


@each_decoder
def test_many_candidates_are_independent(decoder):
    states = states_of(decoder, TEXT, 1)
    step = step_at(decoder, 0, states[0], 3)
    rows = torch.cat([states[0], states[0].flip(0)])
    together = step.run(rows)
    for index, row in enumerate(rows):
        alone = step.run(row[None])
        torch.testing.assert_close(together.outputs[index], alone.outputs[0])
        torch.testing.assert_close(together.keys[index], alone.keys[0])
        torch.testing.assert_close(together.values[index], alone.values[0])


@each_decoder
def test_attend_is_what_enters_the_output_projection(decoder):
    states = states_of(decoder, TEXT, 0)[0]
    positions, mask = torch.arange(len(TEXT))[None], torch.ones(1, len(TEXT), dtype=torch.bool)
    with torch.no_grad():
        whole = decoder.mixed_values(0, states[None], positions, mask)[0]
    step = step_at(decoder, 0, states, len(TEXT) - 1)
    torch.testing.assert_close(step.attend(states[-1:]).mixed[0], whole[-1])


@each_decoder
@pytest.mark.parametrize("position", [0, 5])
def test_jacobian_is_autograds(decoder, position):
    """The closed form against reverse-mode differentiation of the adapter's whole block."""
    states = states_of(decoder, TEXT, 1)[1][: position + 1]
    positions, mask = torch.arange(position + 1)[None], torch.ones(1, position + 1, dtype=torch.bool)

    def last_output(row: torch.Tensor) -> torch.Tensor:
        stream = torch.cat([states[:-1], row[None]])[None]
        return decoder.block_forward(1, stream, positions, mask)[0, -1]

    ours = step_at(decoder, 1, states, position).jacobian(states[-1])
    torch.testing.assert_close(ours, jacrev(last_output)(states[-1]).detach())
    assert not ours.requires_grad


@each_decoder
def test_taylor_error_of_the_jacobian_has_slope_two(decoder):
    states = states_of(decoder, TEXT, 1)[1]
    step, row = step_at(decoder, 1, states, 4), states[4]
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(row.shape, generator=generator, dtype=row.dtype)
    jacobian, value = step.jacobian(row), step(row[None])[0]
    # Not smaller: RMSNorm computes in float32 whatever the model's precision, and its rounding would show.
    sizes = torch.tensor([3e-2, 1e-2, 3e-3], dtype=row.dtype)
    errors = torch.stack(
        [(step((row + size * direction)[None])[0] - value - size * (jacobian @ direction)).norm() for size in sizes]
    )
    slopes = errors.log10().diff() / sizes.log10().diff()
    assert (slopes - 2).abs().max() < 0.2


def test_positions_may_begin_anywhere(tiny_gpt2):
    """Left padding: the first real token stands at a later position, and sees no padding."""
    model = tiny_gpt2.to(dtype=torch.float64)
    tokens, mask = torch.tensor([[0, 0, 5, 9]]), torch.tensor([[False, False, True, True]])
    with torch.no_grad():
        before, after = (states[0] for states in model.hidden_states(tokens, mask, num_blocks=1))
    first = BlockStep.first(model, 0, position=2)
    stepped = first.run(before[2:3])
    torch.testing.assert_close(stepped.outputs[0], after[2])
    torch.testing.assert_close(first.following(stepped.keys, stepped.values)(before[3:4])[0], after[3])


def test_encoders_are_refused(tiny_bert):
    with pytest.raises(InputError, match="causal"):
        BlockStep.first(tiny_bert, 0)


def test_a_prefix_grows(tiny_llama):
    prefix = Prefix.empty(tiny_llama, 0)
    assert len(prefix) == 0
    keys = torch.ones(2, tiny_llama.num_key_value_heads, tiny_llama.head_width)
    assert len(prefix.extend(keys, keys).extend(keys[:1], keys[:1])) == 3
