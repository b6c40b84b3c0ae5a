"""Noise is the same in all directions; the difference of two tokens is not."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.prompts.whiteness import Whiteness, WhitenessTest

WIDTH = 256


def whiteness(residual: torch.Tensor, jacobian: torch.Tensor, spread: torch.Tensor) -> Whiteness:
    return WhitenessTest.of(jacobian, spread)(residual)


def loud_and_quiet(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A covariance of tokens' differences with few loud directions, and its square root."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))[0]
    deviations = torch.logspace(1, -3, WIDTH, dtype=torch.float64)
    return basis * deviations.square() @ basis.T, basis * deviations


def test_noise_is_white_and_its_variance_is_measured():
    spread, _ = loud_and_quiet(0)
    noise = 0.3 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = whiteness(noise, torch.eye(WIDTH), spread)
    assert found.is_white
    assert abs(found.noise_variance / 0.09 - 1) < 0.4  # 128 coordinates: 12 %, three times


def test_another_token_is_not():
    spread, root = loud_and_quiet(0)
    difference = root @ torch.randn(WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert not whiteness(difference, torch.eye(WIDTH), spread).is_white


def test_another_token_in_noise_is_not_and_the_noise_is_measured_still():
    spread, root = loud_and_quiet(0)
    generator = torch.Generator().manual_seed(3)
    noise, wrong = (torch.randn(WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    found = whiteness(0.3 * noise + root @ wrong, torch.eye(WIDTH), spread)
    assert not found.is_white
    assert abs(found.noise_variance / 0.09 - 1) < 0.4


def test_nothing_left_is_not_called_noise():
    spread, _ = loud_and_quiet(0)
    assert not whiteness(torch.zeros(WIDTH), torch.eye(WIDTH), spread).is_white
