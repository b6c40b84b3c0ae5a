"""Noise is the same in all directions; the difference of two tokens is not."""

from __future__ import annotations

import torch

from unmask.proof.whiteness import Whiteness, WhitenessTest

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


def test_noise_is_even_as_often_as_the_test_says():
    """The shares of draws below 1 %, 5 % and 50 %, within four deviations."""
    test, generator = WhitenessTest(torch.eye(WIDTH, dtype=torch.float64)), torch.Generator().manual_seed(4)
    drawn = torch.tensor([test(torch.randn(WIDTH, generator=generator)).evenness for _ in range(2000)])
    for share in (0.01, 0.05, 0.5):
        assert abs(float((drawn < share).double().mean()) - share) < 4 * (share * (1 - share) / 2000) ** 0.5


def test_what_is_shorter_in_the_directions_of_tokens_is_no_noise_either():
    """A rotation that is off leaves less there than elsewhere: no token's difference, and no noise."""
    spread, _ = loud_and_quiet(0)
    loudness = torch.linalg.eigh(spread)[1]
    sizes = torch.where(torch.arange(WIDTH) < WIDTH // 2, 1.0, 0.4).double()
    left = loudness @ (sizes * torch.randn(WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    found = whiteness(left, torch.eye(WIDTH), spread)
    assert found.is_white
    assert not found.is_even


def test_a_part_without_noise_is_no_noise():
    spread, _ = loud_and_quiet(0)
    test = WhitenessTest.of(torch.eye(WIDTH), spread)
    noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert test(noise, (64,) * 4).is_even
    assert not test(torch.cat([noise[:64] * 1e-5, noise[64:]]), (64,) * 4).is_even
