"""Copies of a model: once, in the new precision, tied weights still tied, and blocks left out."""

from __future__ import annotations

import pytest
import torch
from tests.models.families import build
from torch import nn

from unmask.models import adapt
from unmask.models.fingerprint import copy_module

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("places", torch.arange(4))


def test_a_copy_has_the_weights_in_the_new_precision_and_the_original_is_left_alone():
    module = Tied()
    copy = copy_module(module, CPU, torch.float64)
    for (name, theirs), (_, ours) in zip(copy.named_parameters(), module.named_parameters(), strict=True):
        assert (theirs.dtype, ours.dtype) == (torch.float64, torch.float32), name
        assert torch.equal(theirs, ours.double())
    assert copy.scale.dtype is torch.float64
    assert copy.places.dtype is torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_shared(dtype):
    module = Tied()
    copy = copy_module(module, CPU, dtype)
    before = module.embedding.weight.clone()
    with torch.no_grad():
        copy.embedding.weight.zero_()
    assert torch.equal(module.embedding.weight, before)


def test_tied_weights_stay_tied():
    copy = copy_module(Tied(), CPU, torch.float64)
    assert copy.head.weight is copy.embedding.weight


def test_whether_a_weight_is_trained_is_kept():
    module = Tied()
    module.blocks[0].weight.requires_grad_(False)
    copy = copy_module(module, CPU, torch.float64)
    assert [p.requires_grad for p in copy.parameters()] == [p.requires_grad for p in module.parameters()]


def test_what_is_left_out_is_not_copied():
    module = Tied()
    copy = copy_module(module, CPU, torch.float64, [module.blocks[1]])
    assert not list(copy.blocks[1].parameters())
    assert torch.equal(copy.blocks[0].weight, module.blocks[0].weight.double())
    assert module.blocks[1].weight.dtype is torch.float32


@torch.no_grad()
def test_experts_run_in_double_precision():
    model = adapt(build("Mixtral"))
    tokens = torch.tensor([[11, 12, 13]])
    twice, once = model.to(dtype=torch.float64).hidden_states(tokens)[-1], model.hidden_states(tokens)[-1]
    assert float((twice - once).norm() / once.norm()) < 1e-5
    assert model.config._experts_implementation != "eager"
