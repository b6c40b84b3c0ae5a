"""Attention without its value matrix: closed forms against autograd, adjoints, masks, Taylor slopes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.linalg.softmax_attention import AttentionMap

quick = settings(max_examples=30)
seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))
shapes = pytest.mark.parametrize(("n", "d"), [(1, 3), (3, 4), (5, 3), (4, 7)])
masks = pytest.mark.parametrize("causal", [False, True])

# Sums of at most 50 terms of size 1 are rounded by about 1e-15.
ROUNDING = 1e-13


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(d: int, causal: bool, seed: int = 0) -> AttentionMap:
    return AttentionMap(gaussian(seed, d, d) / math.sqrt(d), causal)


def slow(W: Tensor, X: Tensor, causal: bool) -> Tensor:
    """Row by row from the definition."""
    rows = []
    for i, query in enumerate(X):
        keys = X[: i + 1] if causal else X
        weights = torch.stack([(query @ W @ key).exp() for key in keys])
        rows.append((weights / weights.sum()) @ keys)
    return torch.stack(rows)


@shapes
@masks
def test_parity_of_the_map_with_its_definition(n, d, causal):
    at, X = attention(d, causal), gaussian(1, n, d)
    torch.testing.assert_close(at(X), slow(at.W, X, causal), rtol=ROUNDING, atol=ROUNDING)


@shapes
@masks
def test_parity_of_the_derivatives_with_autograd(n, d, causal):
    at, X, U = attention(d, causal), gaussian(1, n, d), gaussian(2, n, d)
    point = at.at(X)
    jacobian = torch.func.jacrev(at)(X)
    torch.testing.assert_close(point.mixed, at(X))
    torch.testing.assert_close(point.jacobian(), jacobian, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(point.jvp(U), torch.func.jvp(at, (X,), (U,))[1], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(point.vjp(U), torch.func.vjp(at, X)[1](U)[0], rtol=ROUNDING, atol=ROUNDING)
    moved = torch.func.jvp(lambda S: S.softmax(-1), (X @ at.W @ X.mT,), (gaussian(3, n, n),))[1]
    if not causal:
        torch.testing.assert_close(point.weights_jvp(gaussian(3, n, n)), moved, rtol=ROUNDING, atol=ROUNDING)


@quick
@given(seeds, sizes, st.booleans())
def test_vjp_is_the_adjoint_of_jvp(seed, size, causal):
    point = attention(size[1], causal, seed).at(gaussian(seed + 1, *size))
    U, R = gaussian(seed + 2, *size), gaussian(seed + 3, *size)
    forward, backward = (point.jvp(U) * R).sum(), (U * point.vjp(R)).sum()
    # Scores of a random layer reach 30 and multiply the rounding.
    assert float((forward - backward).abs()) <= 1e-11 * float(point.jvp(U).norm() * R.norm() + 1)


@quick
@given(seeds, sizes, st.booleans())
def test_rows_are_convex_combinations(seed, size, causal):
    at, X = attention(size[1], causal, seed), gaussian(seed + 1, *size)
    weights = at.weights(X)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(size[0], dtype=torch.float64))
    assert (at(X).norm(dim=1) <= X.norm(dim=1).max() * (1 + 1e-12)).all()


def test_a_causal_row_depends_on_no_later_token():
    at, X = attention(4, True), gaussian(1, 5, 4)
    changed = torch.cat([X[:3], gaussian(2, 2, 4)])
    assert torch.equal(at(changed)[:3], at(X)[:3])
    assert not at.at(X).jacobian()[:3, :, 3:].any()
    torch.testing.assert_close(at(X)[0], X[0])


@masks
def test_taylor_slope_2(causal):
    at, X, U = attention(4, causal), gaussian(1, 5, 4), gaussian(2, 5, 4)
    point = at.at(X)
    steps = [1e-2, 1e-3, 1e-4]
    errors = [float((at(X + t * U) - point.mixed - t * point.jvp(U)).norm()) for t in steps]
    slope = math.log(errors[0] / errors[-1]) / math.log(steps[0] / steps[-1])
    assert slope == pytest.approx(2, abs=0.1)  # the next term is a hundredth of this one at t = 1e-2


def test_a_batch_of_inputs_is_mapped_one_by_one():
    at, X = attention(4, True), gaussian(1, 3, 5, 4)
    torch.testing.assert_close(at(X), torch.stack([at(one) for one in X]))
