"""The paper's loss: its names, closed forms against autograd, the four cases of the Hessian, Taylor slopes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.linalg.attention_loss import AttentionLoss
from unmask.linalg.softmax_attention import AttentionMap

quick = settings(max_examples=25)
seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
# Tokens, width, output width; the last two cross a tile's size (n·d > 128), the last a strip's (n³d > 2¹⁸).
SHAPES = [(1, 3, 2), (3, 4, 4), (5, 3, 2), (4, 7, 9), (6, 5, 3), (8, 16, 16), (20, 15, 15), (150, 3, 3)]
SMALL = SHAPES[:-2]
masks = pytest.mark.parametrize("causal", [False, True])

# Relative, in the Frobenius norm; measured 2e-15 at the most.
PARITY = 1e-12


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def problem(n: int, d: int, e: int, causal: bool, gamma: float = 0.3, seed: int = 0) -> tuple[AttentionLoss, Tensor]:
    attention = AttentionMap(gaussian(seed, d, d) / math.sqrt(d), causal)
    loss = AttentionLoss(attention, gaussian(seed + 1, d, e) / math.sqrt(d), gaussian(seed + 2, n, e), gamma)
    return loss, gaussian(seed + 3, n, d)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-3))


def slow_hessian(function, X: Tensor) -> Tensor:
    return torch.func.hessian(function)(X).reshape(X.numel(), X.numel())


# Definitions: u, α, f, h, c


@masks
def test_the_papers_names_make_the_loss(causal):
    loss, X = problem(4, 3, 5, causal)
    point = loss.at(X)
    u = (X @ loss.map.W @ X.mT).exp()
    u = u.tril() if causal else u
    torch.testing.assert_close(point.u, u)
    torch.testing.assert_close(point.alpha, u.sum(1))
    torch.testing.assert_close(point.f, u / u.sum(1, keepdim=True))
    torch.testing.assert_close(point.h, X @ loss.V)
    torch.testing.assert_close(point.c, (u / u.sum(1, keepdim=True)) @ X @ loss.V - loss.B)
    assert point.value == pytest.approx(float(point.c.square().sum() + 0.3 * X.square().sum()))
    assert point.value == pytest.approx(float(loss(X)))


def test_scores_beyond_the_exponentials_range_are_no_matter():
    loss, X = problem(4, 3, 5, False)
    point = loss.at(100 * X)
    assert not point.u.isfinite().all()
    assert point.gradient.isfinite().all()
    assert point.hessian().isfinite().all()


# Parity with autograd


@masks
@pytest.mark.parametrize(("n", "d", "e"), SMALL)
def test_parity_of_the_gradient(n, d, e, causal):
    loss, X = problem(n, d, e, causal)
    assert distance(loss.at(X).gradient, torch.func.grad(loss)(X)) < PARITY


@masks
@pytest.mark.parametrize(("n", "d", "e"), SMALL)
def test_parity_of_the_hessian(n, d, e, causal):
    loss, X = problem(n, d, e, causal)
    assert distance(loss.at(X).hessian(), slow_hessian(loss, X)) < PARITY


@masks
@pytest.mark.parametrize(("n", "d", "e"), SMALL)
def test_parity_of_the_gauss_newton_part(n, d, e, causal):
    loss, X = problem(n, d, e, causal)
    J = torch.func.jacrev(lambda X: loss.map(X) @ loss.V)(X).reshape(n * e, n * d)
    assert distance(loss.at(X).gauss_newton(), 2 * J.T @ J) < PARITY


@quick
@given(seeds, sizes, st.booleans(), st.floats(0.01, 30))
def test_products_are_those_of_autograd(seed, size, causal, scale):
    loss, X = problem(*size, causal, seed=seed)
    X = X * scale / math.sqrt(size[1])
    U = gaussian(seed + 9, *X.shape)
    expected = torch.func.jvp(torch.func.grad(loss), (X,), (U,))[1]
    # Large scores cancel in autograd as they do here: the terms are scale² times the result.
    assert distance((loss.at(X).hessian() @ U.flatten()).view_as(U), expected) < PARITY * max(1, scale) ** 2


# Definition 4.2: H1 … H4. Residual in one row i only, so that Q is the second derivative of that row alone.


def one_row(causal: bool, i: int) -> tuple[Tensor, Tensor]:
    """2Q in closed form and by autograd, as (m, a, l, b), when only row i is not explained."""
    loss, X = problem(4, 3, 5, causal, gamma=0.0)
    c = torch.zeros(4, 5, dtype=torch.float64)
    c[i] = gaussian(7, 5)
    output = loss.map(X) @ loss.V
    found = replace(loss, B=output - c).at(X).curvature()
    expected = torch.func.hessian(lambda X: 2 * (c * (loss.map(X) @ loss.V)).sum())(X)
    return found.view(4, 3, 4, 3), expected


@masks
@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize(
    ("case", "belongs"),
    [
        ("H1", lambda i, m, k: m == i and k == i),
        ("H2", lambda i, m, k: m == i and k != i),
        ("H3", lambda i, m, k: m != i and k == i),
        ("H4, m ≠ k", lambda i, m, k: m != i and k != i and m != k),
        ("H4, m = k", lambda i, m, k: m != i and m == k),
    ],
)
def test_definition_4_2_each_case_of_the_hessian(case, belongs, i, causal):
    found, expected = one_row(causal, i)
    blocks = [(m, k) for m in range(4) for k in range(4) if belongs(i, m, k)]
    assert blocks
    for m, k in blocks:
        torch.testing.assert_close(found[m, :, k], expected[m, :, k], rtol=1e-11, atol=1e-12, msg=f"{case} at {m}, {k}")


def test_h4_hides_two_cases():
    """With m = l, H4 has a term more than with m ≠ l: as one formula it would miss most of the block."""
    _, expected = one_row(False, 0)
    loss, X = problem(4, 3, 5, False, gamma=0.0)
    c = gaussian(7, 5)
    f, z, q = loss.map.weights(X)[0], X[0] @ loss.map.W, loss.V @ c
    e = f * ((X - f @ X) @ q)
    one_formula = [
        2 * (-(2 * f[m] * e[m]) * torch.outer(z, z) - f[m] ** 2 * (torch.outer(q, z) + torch.outer(z, q)))
        for m in (1, 2, 3)
    ]
    assert max(distance(found, expected[m, :, m]) for m, found in zip((1, 2, 3), one_formula, strict=True)) > 0.5


@masks
def test_the_hessian_is_the_sum_of_its_parts(causal):
    loss, X = problem(4, 3, 5, causal)
    point = loss.at(X)
    total = point.gauss_newton() + point.curvature() + 2 * loss.gamma * torch.eye(12, dtype=torch.float64)
    assert distance(total, point.hessian()) < PARITY


def test_gauss_newton_is_the_hessian_where_the_data_are_explained():
    loss, X = problem(4, 3, 5, False, gamma=0.0)
    point = replace(loss, B=loss.map(X) @ loss.V).at(X)
    assert distance(point.gauss_newton(), point.hessian()) < PARITY
    assert float(torch.linalg.eigvalsh(point.gauss_newton())[0]) > -1e-12


def test_the_loss_is_not_convex():
    """The paper calls L convex; without its γ, second derivatives of both signs are the rule."""
    loss, X = problem(4, 8, 8, False, gamma=0.0)
    assert float(torch.linalg.eigvalsh(loss.at(X).hessian())[0]) < -0.1


# Taylor slopes


@masks
def test_taylor_slopes_2_and_3(causal):
    loss, X = problem(5, 4, 3, causal)
    U, point, steps = gaussian(9, 5, 4), loss.at(X), (1e-2, 1e-3)
    first = float((point.gradient * U).sum())
    second = float(U.flatten() @ point.hessian() @ U.flatten())
    linear = [abs(float(loss(X + t * U)) - point.value - t * first) for t in steps]
    square = [abs(float(loss(X + t * U)) - point.value - t * first - t * t / 2 * second) for t in steps]
    # A neighbouring term is a few hundredths of the leading one at t = 1e-2.
    assert math.log10(linear[0] / linear[1]) == pytest.approx(2, abs=0.15)
    assert math.log10(square[0] / square[1]) == pytest.approx(3, abs=0.15)


# Properties


@quick
@given(seeds, sizes)
def test_turning_the_tokens_coordinates_turns_the_gradient(seed, size):
    loss, X = problem(*size, False, seed=seed)
    turn = torch.linalg.qr(gaussian(seed + 5, size[1], size[1]))[0]
    turned = replace(loss, map=AttentionMap(turn.T @ loss.map.W @ turn), V=turn.T @ loss.V)
    assert distance(turned.at(X @ turn).gradient, loss.at(X).gradient @ turn) < 1e-11


@quick
@given(seeds, sizes)
def test_exchanging_tokens_exchanges_the_blocks(seed, size):
    loss, X = problem(*size, False, seed=seed)
    n, d, _ = size
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    blocks = loss.at(X).hessian().view(n, d, n, d)[order][:, :, order].reshape(n * d, n * d)
    assert distance(replace(loss, B=loss.B[order]).at(X[order]).hessian(), blocks) < 1e-11


@quick
@given(seeds, sizes, st.booleans())
def test_hessians_are_symmetric_to_the_last_bit(seed, size, causal):
    loss, X = problem(*size, causal, seed=seed)
    H = loss.at(X).hessian()
    assert torch.equal(H, H.T)


def test_the_input_is_not_changed():
    loss, X = problem(4, 3, 5, True)
    before = X.clone(), loss.map.W.clone(), loss.V.clone(), loss.B.clone()
    point = loss.at(X)
    point.hessian(), point.gradient
    assert all(torch.equal(a, b) for a, b in zip(before, (X, loss.map.W, loss.V, loss.B), strict=True))
