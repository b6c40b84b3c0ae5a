"""A text that is known up to a position: its candidates' states are those of the whole forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.models import Model
from unmask.models.readouts import FINAL_NORM, STREAM

TEXT = [5, 17, 99, 17, 250, 8]
LAYER, MIDDLE = 3, 1
# The same sums in another order, float32, three blocks.
PARITY = 1e-5


@pytest.fixture(params=["tiny_gpt2", "tiny_llama", "tiny_mistral"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@torch.no_grad()
def states(model: Model, tokens: list[int], normed: bool = False) -> list[Tensor]:
    streams = [stream[0] for stream in model.hidden_states(torch.tensor([tokens]), num_blocks=LAYER)]
    return [*streams[:-1], model.final_norm(streams[-1])] if normed else streams


def begun(model: Model, tokens: list[int], normed: bool = False) -> Continuation:
    readout = FINAL_NORM if normed else STREAM
    text = Continuation.start(model, LAYER, middle_layer=MIDDLE, readout=readout)
    return text.advance(text.run(torch.tensor(tokens)), len(tokens)) if tokens else text


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float(((ours - theirs).norm() / theirs.norm()).detach()) < PARITY


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_known", [0, 1, 4])
def test_candidates_states_are_those_of_the_forward_pass(model, num_known, normed):
    trial = begun(model, TEXT[:num_known], normed).trial(torch.tensor([3, 400, 77]))
    for index, token in enumerate([3, 400, 77]):
        whole = states(model, [*TEXT[:num_known], token], normed)
        assert close(trial.states[index], whole[LAYER][-1])
        assert close(trial.middle[index], whole[MIDDLE][-1])


def test_a_guess_of_many_positions_is_one_forward_pass(model):
    seen = begun(model, TEXT[:2]).run(torch.tensor(TEXT[2:])).states
    assert close(seen, states(model, TEXT)[LAYER][2:])


def test_accepting_one_by_one_is_advancing_by_many(model):
    text = begun(model, TEXT[:1])
    for token in TEXT[1:]:
        trial = text.trial(torch.tensor([7, token]))
        text = text.accept(trial.only(1), 0)
    at_once = begun(model, TEXT)
    assert (text.position, text.num_known) == (at_once.position, at_once.num_known) == (len(TEXT), len(TEXT))
    for ours, theirs in zip(text.prefixes, at_once.prefixes, strict=True):
        assert close(ours.keys, theirs.keys)
        assert close(ours.values, theirs.values)


def test_a_text_may_begin_later(tiny_gpt2):
    """Left padding: positions are counted from where the text begins."""
    text = Continuation.start(tiny_gpt2, LAYER, position=4)
    tokens, mask = torch.tensor([[0, 0, 0, 0, *TEXT]]), torch.tensor([[False] * 4 + [True] * len(TEXT)])
    with torch.no_grad():
        whole = tiny_gpt2.hidden_states(tokens, mask, num_blocks=LAYER)[LAYER][0, 4:]
    assert close(text.run(torch.tensor(TEXT)).states, whole)


@pytest.mark.parametrize("normed", [False, True])
def test_the_jacobian_is_that_of_autograd(model, normed):
    text = begun(model, TEXT[:3], normed)
    middle = text.trial(torch.tensor([42])).middle[0]
    state, ours = text.jacobian(middle)

    def rest(stream: Tensor) -> Tensor:
        rows = torch.cat([states(model, TEXT[:3])[MIDDLE], stream[None]])[None]
        positions, mask = torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool)
        for block in range(MIDDLE, LAYER):
            rows = model.block_forward(block, rows, positions, mask)
        return text.readout(model, rows[0], positions[0])[-1]

    assert close(state, rest(middle))
    assert close(ours, torch.func.jacrev(rest)(middle))


@pytest.mark.parametrize("normed", [False, True])
def test_some_directions_of_the_jacobian_are_those_of_the_whole(model, normed):
    text = begun(model, TEXT[:3], normed)
    middle = text.trial(torch.tensor([42])).middle[0]
    state, whole = text.jacobian(middle)
    through = torch.randn(5, len(state), generator=torch.Generator().manual_seed(0))
    same, ours = text.jacobian(middle, through)
    assert torch.equal(same, state)
    assert close(ours, through @ whole)
