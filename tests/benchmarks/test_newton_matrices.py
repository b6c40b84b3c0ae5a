"""Sampled rows of the Jacobian: the sketch fails as rarely as matrix Chernoff promises."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from outputs.newton_matrices import GaussNewton, SampledRows, Sampling, row_probabilities, sample_rows, sketch_size
from torch import Tensor

from unmask.errors import InputError
from unmask.linalg.attention_loss import AttentionLoss, LossPoint
from unmask.linalg.softmax_attention import AttentionMap
from unmask.solvers.newton import Newton, NewtonMatrix


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def point(gamma: float, n: int = 4, d: int = 3, e: int = 5, noise: float = 1.0, seed: int = 0) -> LossPoint:
    """A point of a random layer whose residual has the size `noise`."""
    attention, V, X = AttentionMap(gaussian(seed, d, d)), gaussian(seed + 1, d, e), gaussian(seed + 2, n, d)
    B = attention(X) @ V + noise * gaussian(seed + 3, n, e)
    return AttentionLoss(attention, V, B, gamma).at(X)


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


def problem(seed: int = 0) -> tuple[AttentionLoss, Tensor]:
    """A layer with a positive definite W, and the input that explains its output."""
    A, X = gaussian(seed, 8, 8), gaussian(seed + 2, 4, 8)
    attention, V = AttentionMap(A @ A.T / 8**1.5), gaussian(seed + 1, 8, 8) / math.sqrt(8)
    return AttentionLoss(attention, V, attention(X) @ V, 0.0), X


def errors(loss: AttentionLoss, X: Tensor, start: Tensor, matrix: NewtonMatrix, steps: int) -> list[float]:
    solver = Newton(matrix=matrix)
    state = solver.init(loss, start)
    found = [float((state.x - X).norm())]
    for _ in range(steps):
        state = solver.step(loss, state)
        found.append(float((state.x - X).norm()))
    return found


def test_theorem_1_3_a_sketched_matrix_needs_the_whole_logarithm():
    """Linear convergence: each step takes off a constant share, so that decades cost the same each."""
    (loss, X), away = problem(), gaussian(5, 4, 8)
    found = errors(loss, X, X + 1e-4 * X.norm() * away / away.norm(), SampledRows(4 * sketch_size(32, 0.5, 0.1)), 12)
    shares = [after / before for before, after in pairwise(found[3:])]
    assert max(shares) < 0.7  # ε/(1 − ε) with ε = 0.25 is 0.33, in the metric of J
    assert min(shares) > 0.01  # quadratic convergence would be far below
    assert found[-1] > 1e-13
