"""Gradients of single texts by forward passes are those of autograd."""

import pytest
import torch

from unmask.attacks.gradients.noisy.text_gradients import last_block_gradients
from unmask.models.linear import Role
from unmask.protocols import observe_gradients

TEXTS = [(5, 17, 99, 250, 8), (5, 17, 98, 250, 8), (400, 3)]


@pytest.mark.parametrize("role", [Role.MLP_OUT, Role.ATTENTION_OUT])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_they_are_the_gradients_of_the_mean_loss(request, name, role):
    model = request.getfixturevalue(name)
    found = list(last_block_gradients(model, role, TEXTS, 2**20))
    for text, gradient in zip(TEXTS, found, strict=True):
        whole = observe_gradients(model, [list(text)]).linear(model, role, model.num_blocks - 1)
        torch.testing.assert_close(gradient, whole.double(), rtol=1e-3, atol=1e-5 * float(whole.abs().max()))
