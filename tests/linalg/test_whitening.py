"""Gradients side by side with white noise: by variances that are given, and by their spectra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmask.linalg.whitening import balance, rescale, whiten

D, M, RANK = 60, 90, 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs() -> Tensor:
    return torch.linalg.qr(normal(D, RANK, seed=0))[0]


def gradient(sigma: float, seed: int) -> Tensor:
    return inputs() @ normal(RANK, M, seed=seed) + sigma * normal(D, M, seed=seed + 100)


def test_each_gradient_is_divided_by_its_own_noise():
    white = whiten([gradient(1e-3, 1), gradient(1e-1, 2)])
    assert white.sigmas == pytest.approx((1e-3, 1e-1), rel=0.05)
    outside = white.matrix - inputs() @ (inputs().T @ white.matrix)
    for part in outside.split(white.widths, dim=1):
        assert float(part.square().sum() / ((D - RANK) * M)) == pytest.approx(1, rel=0.1)


def test_given_variances_of_rows_and_columns_become_one():
    rows, columns = normal(D, seed=3).exp(), normal(M, seed=4).exp()
    noise = rows[:, None] * normal(D, M, seed=5) * columns
    white = whiten([noise], [(rows[:, None] * columns).square()])
    assert float(white.matrix.square().mean(0).max()) < 2  # sixty entries of variance one
    assert float(white.matrix.square().mean(1).min()) > 0.5
    assert torch.allclose(white.row_scale * rows, (white.row_scale * rows)[0].expand(D))


def test_noise_beyond_what_is_given_is_divided_out():
    white = whiten([gradient(1e-2, 1)], [torch.full((D, M), 1e-6)])
    assert white.sigmas[0] == pytest.approx(1e-2, rel=0.05)
    assert white.excess == pytest.approx(10, rel=0.05)


def test_a_bound_that_is_too_large_is_kept():
    assert whiten([gradient(1e-3, 1)], [torch.full((D, M), 1e-2)]).sigmas[0] == pytest.approx(1e-1)


def test_a_gradient_without_free_directions_gets_its_noise_from_the_basis():
    narrow = (inputs() @ normal(RANK, 5, seed=1)) + 1e-3 * normal(D, 5, seed=2)
    white = whiten([gradient(1e-3, 3), narrow])
    better = rescale(white, inputs())
    assert better.sigmas == pytest.approx((1e-3, 1e-3), rel=0.1)
    assert all(after <= before for after, before in zip(better.sigmas, white.sigmas, strict=True))


def test_rows_and_columns_of_zeros_get_zero():
    variance = torch.ones(4, 5, dtype=torch.float64)
    variance[2] = 0
    variance[:, 1] = 0
    rows, columns = balance(variance)
    assert rows[2] == 0
    assert columns[1] == 0
    assert torch.isfinite(rows).all()
    assert torch.isfinite(columns).all()


def test_louder_noise_is_a_smaller_matrix():
    white = whiten([torch.randn(6, 30, generator=torch.Generator().manual_seed(0))])
    louder = white.louder(10.0)
    torch.testing.assert_close(louder.matrix, white.matrix / 10)
    assert louder.sigmas == pytest.approx([10 * sigma for sigma in white.sigmas])
