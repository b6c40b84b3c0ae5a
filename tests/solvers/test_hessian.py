"""Four ways to solve H p = −∇L: they agree where they must, and the sketch fails as rarely as it promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from unmask.errors import InputError
from unmask.linalg.attention_loss import AttentionLoss, LossPoint
from unmask.linalg.softmax_attention import AttentionMap
from unmask.solvers.hessian import (
    Dense,
    GaussNewton,
    MatrixFree,
    SampledRows,
    Sampling,
    row_probabilities,
    sample_rows,
    sketch_size,
)


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def point(gamma: float, n: int = 4, d: int = 3, e: int = 5, noise: float = 1.0, seed: int = 0) -> LossPoint:
    """A point of a random layer whose residual has the size `noise`."""
    attention, V, X = AttentionMap(gaussian(seed, d, d)), gaussian(seed + 1, d, e), gaussian(seed + 2, n, d)
    B = attention(X) @ V + noise * gaussian(seed + 3, n, e)
    return AttentionLoss(attention, V, B, gamma).at(X)


def slope(at: LossPoint, direction: Tensor) -> float:
    return float((at.gradient * direction).sum())


# Directions


def test_dense_solves_with_the_hessian():
    at = point(gamma=0.1)
    p = Dense().direction(at)
    torch.testing.assert_close(at.hessian_product(p), -at.gradient, rtol=1e-8, atol=1e-8)


def test_matrix_free_is_dense_where_the_hessian_is_positive():
    at = point(gamma=50.0)
    assert float(torch.linalg.eigvalsh(at.hessian())[0]) > 0
    torch.testing.assert_close(MatrixFree(1e-12).direction(at), Dense().direction(at), rtol=1e-9, atol=1e-9)


def test_gauss_newton_is_dense_where_the_residual_is_small():
    far, near = (
        (GaussNewton().direction(at) - Dense().direction(at)).norm() / Dense().direction(at).norm()
        for at in (point(gamma=1.0, noise=1e-2), point(gamma=1.0, noise=1e-4))
    )
    # γX keeps the gradient away from 0; the matrices differ in proportion to the residual.
    assert float(near) == pytest.approx(float(far) / 100, rel=0.2)


def test_shifted_and_gauss_newton_and_matrix_free_go_downhill_where_newton_goes_up():
    at = next(at for seed in range(100) if slope(at := point(gamma=0.0, seed=seed), Dense().direction(at)) > 0)
    for matrix in (Dense(least_eigenvalue=1e-3), GaussNewton(), MatrixFree()):
        assert slope(at, matrix.direction(at)) < 0


def test_conjugate_gradients_stop_at_negative_curvature():
    """Against the largest gradients of a maximum: the first direction bends down, and is returned as it is."""
    at = next(
        at
        for seed in range(200)
        if float(((at := point(gamma=0.0, noise=3.0, seed=seed)).gradient * at.hessian_product(at.gradient)).sum()) < 0
    )
    assert torch.equal(MatrixFree().direction(at), -at.gradient)


def test_a_singular_hessian_gives_no_finite_direction():
    at = AttentionLoss(
        AttentionMap(torch.zeros(2, 2, dtype=torch.float64)), torch.zeros(2, 2, dtype=torch.float64), gaussian(0, 3, 2)
    ).at(gaussian(1, 3, 2))
    assert not Dense().direction(at).isfinite().any()


# The sketch


def test_the_size_of_a_sketch():
    assert sketch_size(10, 0.5, 0.1) == math.ceil(3 * 10 / 0.25 * math.log(200))
    assert sketch_size(10, 0.25, 0.1) == pytest.approx(4 * sketch_size(10, 0.5, 0.1), abs=4)
    with pytest.raises(InputError, match=r"epsilon in \(0, 1\]"):
        sketch_size(10, 2.0, 0.1)


@pytest.mark.parametrize("sampling", list(Sampling))
def test_a_sample_has_the_gram_matrix_as_its_mean(sampling):
    J = gaussian(0, 40, 5) * torch.logspace(0, 1, 40, dtype=torch.float64)[:, None]
    generator, probabilities = torch.Generator().manual_seed(0), row_probabilities(J, sampling)
    assert float(probabilities.sum()) == pytest.approx(1)
    rows = sample_rows(J, probabilities, 100_000, generator)
    # Relative error of a mean of m draws: √(dimension/m), about 1 %.
    assert float((rows.mT @ rows - J.mT @ J).norm() / (J.mT @ J).norm()) < 0.05


@pytest.mark.parametrize("epsilon", [0.3, 0.9])
@pytest.mark.parametrize("sampling", list(Sampling))
def test_matrix_chernoff_the_sketch_fails_at_most_as_often_as_promised(sampling, epsilon):
    """Rows of very different norms; (1 − ε)JᵀJ ≤ JᵀSJ ≤ (1 + ε)JᵀJ is asked in J's own metric."""
    delta, trials = 0.2, 60
    J = gaussian(0, 60, 4) * torch.logspace(-1, 1, 60, dtype=torch.float64)[:, None]
    values = torch.linalg.svdvals(J)
    dimension = 4 if sampling is Sampling.LEVERAGE else float(values.square().sum() / values[-1] ** 2)
    size = sketch_size(dimension, epsilon, delta)
    whiten = torch.linalg.inv(torch.linalg.qr(J)[1])
    generator, probabilities = torch.Generator().manual_seed(1), row_probabilities(J, sampling)
    failures = 0
    for _ in range(trials):
        rows = sample_rows(J, probabilities, size, generator) @ whiten
        eigenvalues = torch.linalg.eigvalsh(rows.mT @ rows)
        failures += bool(eigenvalues[0] < 1 - epsilon or eigenvalues[-1] > 1 + epsilon)
    assert failures / trials <= delta


def test_a_tenth_of_the_promised_rows_fails_often():
    """The bound is no empty one: far below its size the sketch is no approximation."""
    J, epsilon = gaussian(0, 400, 20), 0.3
    size = sketch_size(20, epsilon, 0.2) // 20
    whiten = torch.linalg.inv(torch.linalg.qr(J)[1])
    rows = sample_rows(J, row_probabilities(J, Sampling.LEVERAGE), size, torch.Generator().manual_seed(0)) @ whiten
    assert float(torch.linalg.eigvalsh(rows.mT @ rows)[0]) < 1 - epsilon


@pytest.mark.parametrize("sampling", list(Sampling))
def test_sampled_rows_come_near_gauss_newton(sampling):
    at = point(gamma=0.5)
    exact = GaussNewton().direction(at)
    found = SampledRows(200_000, sampling).direction(at)
    assert float((found - exact).norm() / exact.norm()) < 0.05
    assert torch.equal(found, SampledRows(200_000, sampling).direction(at))
