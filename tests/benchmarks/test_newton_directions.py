"""Three ways to solve H p = −∇L: they agree where they must."""

from __future__ import annotations

import pytest
import torch
from outputs.newton_matrices import GaussNewton, MatrixFree, hessian_product
from tests.linalg.test_attention_loss import PARITY, SHAPES, distance, masks, problem
from torch import Tensor

from unmask.linalg.attention_loss import AttentionLoss, LossPoint
from unmask.linalg.softmax_attention import AttentionMap
from unmask.solvers.newton import Dense


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


@masks
@pytest.mark.parametrize(("n", "d", "e"), SHAPES)
def test_products_are_those_of_the_hessian(n, d, e, causal):
    loss, X = problem(n, d, e, causal)
    at, U = loss.at(X), gaussian(9, n, d)
    assert distance(at.hessian() @ U.flatten(), hessian_product(at, U).flatten()) < PARITY


def test_dense_solves_with_the_hessian():
    at = point(gamma=0.1)
    p = Dense().direction(at)
    torch.testing.assert_close(hessian_product(at, p), -at.gradient, rtol=1e-8, atol=1e-8)


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
        if (g := (at := point(gamma=0.0, noise=3.0, seed=seed)).gradient.flatten()) @ at.hessian() @ g < 0
    )
    assert torch.equal(MatrixFree().direction(at), -at.gradient)


def test_a_singular_hessian_gives_no_finite_direction():
    at = AttentionLoss(
        AttentionMap(torch.zeros(2, 2, dtype=torch.float64)), torch.zeros(2, 2, dtype=torch.float64), gaussian(0, 3, 2)
    ).at(gaussian(1, 3, 2))
    assert not Dense().direction(at).isfinite().any()
