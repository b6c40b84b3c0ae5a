"""The update of an encoder–decoder's client."""

from __future__ import annotations

import pytest
import torch
from tests.models.families import build

import unmask
from unmask.errors import InputError
from unmask.evidence.gradients import Task
from unmask.protocols.pairs import observe_pairs

PAIRS = [((0, 11, 12, 2), (0, 51, 52, 53, 2)), ((0, 21, 2), (0, 61, 2))]


@pytest.fixture(scope="module")
def model():
    return unmask.load_encoder_decoder(build("Bart"))


def test_the_gradient_is_that_of_transformers_own_loss(model):
    hf = model.hf
    read = torch.tensor([[0, 11, 12, 2], [0, 21, 2, 1]])
    labels = torch.tensor([[0, 51, 52, 53, 2], [0, 61, 2, -100, -100]])
    hf(input_ids=read, attention_mask=(read != 1).long(), labels=labels).loss.backward()
    seen = observe_pairs(model, PAIRS)
    try:
        for name, parameter in hf.named_parameters():
            assert torch.allclose(seen.gradients[name], parameter.grad, atol=1e-6), name
    finally:
        hf.zero_grad()
    assert (seen.task, seen.num_texts) == (Task.NEXT_TOKEN, 2)


def test_observe_gradients_is_the_same_door(model):
    one, other = observe_pairs(model, PAIRS), unmask.observe_gradients(model, PAIRS)
    assert all(torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)


@pytest.mark.parametrize("pairs", ["a text", ["a text"], [(1, 2, 3)], None])
def test_single_texts_are_refused(model, pairs):
    with pytest.raises(InputError, match="text read, text written"):
        observe_pairs(model, pairs)


def test_training_mode_is_left_as_it_was(model):
    model.hf.train()
    model.hf.model.encoder.eval()
    observe_pairs(model, PAIRS)
    assert model.hf.training
    assert not model.hf.model.encoder.training
    model.hf.eval()
