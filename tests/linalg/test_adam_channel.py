"""Adam's channel: its recursion is torch's, its slopes are right, and moments are near those of brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.linalg.adam_channel import AdamSteps, guess_scales, posterior_moments

EPSILON, BETAS = 1e-8, (0.9, 0.999)


def channel(num_steps: int, begins_at_zero: bool = False, profiles: int = 3) -> AdamSteps:
    return AdamSteps(num_steps, begins_at_zero, profiles, EPSILON, BETAS)


def run_adam(gradients: torch.Tensor) -> torch.Tensor:
    """What torch's Adam does with these gradients (K, n), one after the other, at a learning rate of 1."""
    weights = torch.zeros(gradients.shape[1], dtype=torch.float64, requires_grad=True)
    adam = torch.optim.AdamW([weights], lr=1.0, betas=BETAS, eps=EPSILON, weight_decay=0.0)
    for gradient in gradients:
        weights.grad = gradient.clone()
        adam.step()
    return -weights.detach()


@settings(max_examples=40)
@given(
    num_steps=st.integers(3, 12),
    begins_at_zero=st.booleans(),
    profiles=st.integers(2, 4),
    scale=st.floats(-9, -3),
    seed=st.integers(0, 10**6),
)
def test_the_recursion_is_that_of_torch(num_steps, begins_at_zero, profiles, scale, seed):
    steps = channel(num_steps, begins_at_zero, profiles)
    draw = torch.Generator().manual_seed(seed)
    u = 10**scale * torch.randn(20, steps.num_profiles, generator=draw, dtype=torch.float64)
    value, slopes = steps(u)
    assert torch.allclose(value, run_adam((u @ steps.profiles).T), rtol=1e-9, atol=1e-12)
    u.requires_grad_()
    exact = torch.autograd.grad(steps(u)[0].sum(), u)[0]
    assert torch.allclose(slopes, exact, rtol=1e-6, atol=1e-9 * float(exact.abs().max()))


@pytest.mark.parametrize(("num_steps", "begins_at_zero"), [(2, False), (4, False), (3, True), (10, True)])
def test_profiles_are_orthogonal_and_the_first_is_steady(num_steps, begins_at_zero):
    steps = channel(num_steps, begins_at_zero)
    assert steps.num_profiles == min(3, num_steps - begins_at_zero)
    assert steps.is_exact == (num_steps - begins_at_zero <= 3)
    grown = torch.arange(num_steps).double() if begins_at_zero else torch.ones(num_steps).double()
    grown /= grown[int(begins_at_zero) :].mean()
    assert torch.allclose(steps.profiles[0], grown)
    plain = (steps.profiles / grown)[:, int(begins_at_zero) :]
    assert torch.allclose(plain @ plain.T / plain.shape[1], torch.eye(steps.num_profiles).double(), atol=1e-9)


def test_first_order():
    """D ≈ top − c·ε/u + Σ a·(drift/u), to second order in all of them."""
    steps = channel(5)
    for size in (1e-3, 1e-4):
        u = torch.tensor([1.0, 0.3 * size, -0.2 * size], dtype=torch.float64) * EPSILON / size
        expected = steps.top - steps.shortfall * size + size * (0.3 * steps.drift[0] - 0.2 * steps.drift[1])
        assert abs(float(steps(u)[0]) - float(expected)) < 30 * size**2


def test_moments_are_near_those_of_sampling():
    """The drift is linearised, and what that leaves widens the posterior: it is never narrower than the exact one."""
    steps, draw = channel(3, profiles=2), torch.Generator().manual_seed(0)
    mean = torch.tensor([2e-6, 1e-8], dtype=torch.float64)
    root = torch.tensor([[1e-6, 0.0], [5e-9, 2e-8]], dtype=torch.float64)
    samples = mean + torch.randn(1_000_000, 2, generator=draw, dtype=torch.float64) @ root.T
    sigma = 1e-4
    measured = float(steps(torch.tensor([1.5e-6, 2e-8], dtype=torch.float64))[0])
    weights = (-0.5 * ((steps(samples)[0] - measured) / sigma) ** 2).softmax(0)
    expected = (weights[:, None] * samples).sum(0)
    off = samples - expected
    spread = torch.einsum("n,np,nq->pq", weights, off, off)
    found, covariance = posterior_moments(
        steps,
        torch.tensor([measured], dtype=torch.float64),
        torch.tensor([sigma], dtype=torch.float64),
        mean[None],
        (root @ root.T)[None],
        (48, 32, 32),
    )
    exact, deviations = spread.diagonal().sqrt(), covariance[0].diagonal().sqrt()
    assert bool(((found[0] - expected).abs() < exact).all())
    assert bool((deviations > 0.9 * exact).all())
    assert bool((deviations < 3 * exact).all())
    assert float(deviations[0]) < 0.3 * float(root[0, 0])


def test_scales_are_guessed_within_a_factor():
    steps, draw = channel(2), torch.Generator().manual_seed(1)
    true = torch.tensor([3e-7, 1e-6, 2e-6, 8e-7], dtype=torch.float64)
    u0 = true * torch.randn(300, 4, generator=draw, dtype=torch.float64)
    drift = 1e-2 * true * torch.randn(300, 4, generator=draw, dtype=torch.float64)
    measured = steps(torch.stack([u0, drift], -1))[0]
    sigma = torch.full_like(measured, 1e-5)
    found = guess_scales(steps, measured, sigma, torch.ones(300, dtype=torch.float64), [slice(0, 4)])
    assert found.shape == (4, 3)
    assert bool(((found[:, 0] / true).log().abs() < 1.2).all())


@pytest.mark.parametrize(("num_steps", "begins_at_zero"), [(1, False), (2, True)])
def test_one_gradient_is_no_channel(num_steps, begins_at_zero):
    with pytest.raises(InputError, match="two gradients"):
        channel(num_steps, begins_at_zero)
