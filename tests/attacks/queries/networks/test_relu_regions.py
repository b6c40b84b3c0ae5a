"""One sweep: circles lie where they should, gradients are those of autograd, kinks too close become one."""

import math

import pytest
import torch
from tests.attacks.queries.random_networks import random_layers, relative

from unmask.attacks.queries.networks.relu_regions import Noise, _apart, random_circle, region_gradients, sweep


@pytest.mark.parametrize("biases", [False, True])
def test_a_circle_is_one_and_keeps_s_positive(biases):
    circle = random_circle(6, biases, torch.Generator().manual_seed(0))
    angles = torch.linspace(circle.start, circle.end, 50, dtype=torch.float64)
    points = circle(angles)
    frame = torch.cat([circle.p[None], circle.q[None], circle.rest])
    assert torch.allclose(frame @ frame.T, torch.eye(6).double(), atol=1e-12)
    assert torch.allclose(points.norm(dim=1), torch.ones(50).double())
    if biases:
        assert bool((points[:, -1] > 0).all())


def test_gradients_are_those_of_autograd():
    layers, circle = random_layers(6, 5), random_circle(6, False, torch.Generator().manual_seed(1))
    angles = torch.tensor([0.3, 2.1]).double()
    x = circle(angles).requires_grad_()
    layers(x).sum().backward()
    found, errors = region_gradients(layers, circle, angles, torch.full((2,), 1e-3).double(), 1e-16, 0.0)
    assert relative(found, x.grad) < 1e-10  # 1e-16 over a step of 2e-5
    assert bool((errors < 1e-10).all())


def test_a_corner_that_was_crossed_is_seen_and_avoided():
    """A neuron almost orthogonal to the plane: its kink is far on the circle and near beside it."""
    circle = random_circle(4, False, torch.Generator().manual_seed(2))
    near = 0.001 * circle.p - circle.rest[0]  # the first step is 0.006, the corner at 0.001

    def asked(x):
        return (x @ near).relu() + x @ circle.q

    middle, width = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.6, dtype=torch.float64)
    found, errors = region_gradients(asked, circle, middle, width, 1e-16, 0.0)
    assert relative(found[0], near + circle.q) < 1e-10
    assert float(errors) > 1e-16 / 0.006  # a smaller step was taken


@pytest.mark.parametrize("biases", [False, True])
def test_one_sweep_gives_all_neurons(biases):
    layers = random_layers(6, 5, seed=3, biases=biases)
    circle = random_circle(6 + biases, biases, torch.Generator().manual_seed(3))
    known = layers.described

    def asked(x):
        return x[:, -1] * layers(x[:, :-1] / x[:, -1:]) if biases else layers(x)

    found = sweep(asked, circle, None if biases else known.linear, Noise(1e-16, 1.0), 0.0, 100)
    assert len(found.network) == 5
    x = torch.randn(100, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert relative(found.network(x), layers(x)) < 100 * found.blur
    assert found.blur < 1e-9


def test_kinks_that_are_too_close_become_one():
    kinks = torch.tensor([0.1, 0.5, 0.5 + 1e-9, 0.5 + 2e-9, 0.9], dtype=torch.float64)
    assert torch.allclose(_apart(kinks, 1e-8), kinks[[0, 2, 4]], atol=1e-15)
    assert torch.equal(_apart(kinks, 1e-10), kinks)
    assert len(_apart(kinks[:0], 1e-8)) == 0
    assert Noise(1e-16, 1.0).narrowest == pytest.approx(1e-7)
    assert not math.isnan(Noise(0.0, 0.0).narrowest)
