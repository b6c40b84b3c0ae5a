"""Sketches of gradients: what they estimate, and that nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from unmask.models import Model
from unmask.protocols.gradient_sketches import GradientSketches, Sketch


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Model:
    """Conv1D with tied embeddings; Linear."""
    return request.getfixturevalue(request.param)


def test_nothing_is_left_behind(model):
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    sketched = GradientSketches(model, set(before))
    assert sketched.owners
    with pytest.raises(ZeroDivisionError), sketched:
        raise ZeroDivisionError
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert not any(module._forward_hooks for module in model.hf.modules())
    assert all(parameter.grad is None for _, parameter in model.named_parameters())


def test_a_backward_pass_leaves_sketches_and_no_gradients(model):
    """Of a sum of outputs: G·R is what autograd's gradient times R is."""
    names = {name for name, _ in model.named_parameters()}
    tokens = torch.tensor([[5, 9, 3, 7]])
    formed = dict(model.named_parameters())
    whole = torch.autograd.grad(model.hf(tokens).logits.square().sum(), list(formed.values()), allow_unused=True)
    with GradientSketches(model, names) as sketched:
        others = {name: p for name, p in model.named_parameters() if name not in sketched.owners}
        sketched.send_back(model.hf(tokens).logits.square().sum(), others)
    for name, gradient in zip(formed, whole, strict=True):
        if name in sketched.sketches and gradient is not None:
            sketch = sketched.sketches[name]
            torch.testing.assert_close(sketch.value, sketch.of(gradient), rtol=1e-3, atol=1e-4 * float(gradient.norm()))


def test_the_norm_of_a_difference_is_estimated():
    """‖D·R‖² has the mean ‖D‖², also of a difference of rank 1."""
    ways = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)) / 4
    difference = torch.outer(torch.randn(50), torch.randn(300))
    estimate = float(Sketch(torch.zeros(50, 16), ways).of(difference).norm() / difference.norm())
    assert 0.4 < estimate < 1.8


def test_two_sketches_are_drawn_independently(model):
    """Who knows the columns can change a gradient where they are blind; so nobody knows them before."""
    ways = []
    for _ in range(2):
        with GradientSketches(model, {name for name, _ in model.named_parameters()}) as sketched:
            others = {name: p for name, p in model.named_parameters() if name not in sketched.owners}
            sketched.send_back(model.hf(torch.tensor([[5, 9]])).logits.square().sum(), others)
        ways.append({name: sketch.ways for name, sketch in sketched.sketches.items()})
    assert ways[0]
    assert not any(torch.equal(tensor, ways[1][name]) for name, tensor in ways[0].items())
