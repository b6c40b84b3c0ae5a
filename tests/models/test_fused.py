"""Copies that share weights; quick activations are the same function."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import NewGELUActivation

from unmask.models.fused import copy_sharing_weights, fuse_activations


@torch.no_grad()
def test_fused_activations_compute_the_same_and_the_model_keeps_its_own(tiny_gpt2):
    before = [type(module) for module in tiny_gpt2.hf.modules()]
    fused = fuse_activations(tiny_gpt2)
    assert not any(isinstance(module, NewGELUActivation) for module in fused.hf.modules())
    tokens = torch.tensor([[5, 17, 99, 250]])
    torch.testing.assert_close(fused.hf(tokens).logits, tiny_gpt2.hf(tokens).logits, rtol=1e-5, atol=1e-5)  # rounding
    assert [type(module) for module in tiny_gpt2.hf.modules()] == before
    assert NewGELUActivation in before


@pytest.mark.parametrize("make", [copy_sharing_weights, fuse_activations])
def test_weights_are_shared(tiny_gpt2, make):
    mine, theirs = dict(make(tiny_gpt2).hf.named_parameters()), dict(tiny_gpt2.hf.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is theirs[name] for name in mine)


def test_a_model_whose_activations_are_quick_is_not_copied(tiny_llama):
    assert fuse_activations(tiny_llama) is tiny_llama
