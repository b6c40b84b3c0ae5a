"""The noise of a matrix by its spectrum: σ and the rank of the signal, against matrices where both are known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.linalg.noise import estimate_noise, marchenko_pastur_median, noise_edge, noise_in, square


def noise(d: int, m: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(d, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=20)
@given(seed=st.integers(0, 999), sigma=st.sampled_from([1e-9, 1e-4, 1.0]), shape=st.sampled_from([(60, 60), (40, 200)]))
def test_pure_noise_has_no_rank_and_its_sigma(seed, sigma, shape):
    level = estimate_noise(sigma * noise(*shape, seed))
    assert level.sigma == pytest.approx(sigma, rel=0.1)  # the median of 40 to 60 singular values
    assert level.rank <= 1  # once in a thousand matrices


@pytest.mark.parametrize("shape", [(100, 300), (300, 100), (200, 200)])
@pytest.mark.parametrize("rank", [1, 10, 40])
def test_a_signal_far_above_the_edge_is_counted(shape, rank):
    d, m = shape
    signal = noise(d, rank, 1) @ noise(rank, m, 2)
    level = estimate_noise(signal + 0.1 * noise(d, m, 3))
    assert level.rank == rank
    assert level.sigma == pytest.approx(0.1, rel=0.05)


def test_the_order_of_the_sides_does_not_matter():
    matrix = noise(30, 80) + 3 * noise(30, 2, 1) @ noise(2, 80, 2)
    assert estimate_noise(matrix).rank == estimate_noise(matrix.T).rank
    assert estimate_noise(matrix).sigma == pytest.approx(estimate_noise(matrix.T).sigma)


@pytest.mark.parametrize("shape", [(400, 400), (200, 800), (100, 1000)])
def test_the_median_is_that_of_noise(shape):
    """Marchenko and Pastur's law, by sampling."""
    assert float(torch.linalg.svdvals(noise(*shape)).median()) == pytest.approx(
        marchenko_pastur_median(*shape), rel=0.02
    )


def test_noise_stays_below_its_edge():
    """Johnstone's edge: one of a thousand is above."""
    above = sum(float(torch.linalg.svdvals(noise(30, 50, seed))[0]) > noise_edge(30, 50) for seed in range(300))
    assert above <= 3


@pytest.mark.parametrize("matrix", [torch.zeros(5), torch.zeros(1, 5)])
def test_vectors_have_no_spectrum(matrix):
    with pytest.raises(InputError, match="two rows and columns"):
        estimate_noise(matrix)


def test_the_sides_must_be_in_order():
    with pytest.raises(InputError, match="1 ≤ d ≤ m"):
        marchenko_pastur_median(5, 4)


@pytest.mark.parametrize("shape", [(40, 200), (60, 60), (200, 40)])
def test_the_square_matrix_has_the_same_values_and_left_vectors(shape):
    matrix = noise(*shape)
    left, values, _ = torch.linalg.svd(square(matrix), full_matrices=False)
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix))
    torch.testing.assert_close((left.T @ matrix).norm(dim=1), values)
    assert noise_in(values, max(shape)).sigma == pytest.approx(estimate_noise(matrix).sigma)
