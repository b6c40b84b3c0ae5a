"""Bounds on derivatives: no draw and no ascent exceeds them, and their orders are those that the proofs give."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs.paper_bounds import (
    Sizes,
    convexity_gamma,
    hessian_lipschitz,
    jacobian_norm,
    largest_second_derivative,
    paper_gamma,
    paper_lipschitz,
    second_derivative,
    third_derivative,
    tightness,
)
from paper.unmasking_weights import measure_bounds
from torch import Tensor

from unmask.errors import InputError
from unmask.linalg.attention_bounds import jacobian_lipschitz
from unmask.linalg.attention_loss import AttentionLoss
from unmask.linalg.softmax_attention import AttentionMap

quick = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 4))
# From scores that are nearly uniform to scores where one token takes all.
norms = st.sampled_from([0.01, 0.3, 1.0, 3.0, 30.0])
masks = pytest.mark.parametrize("causal", [False, True])


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(d: int, W_norm: float, causal: bool, seed: int = 0) -> AttentionMap:
    W = gaussian(seed, d, d)
    return AttentionMap(W * W_norm / torch.linalg.matrix_norm(W, 2), causal)


def tokens(seed: int, n: int, d: int, radius: float) -> Tensor:
    """The longest has norm `radius`."""
    X = gaussian(seed, n, d)
    return X * radius / X.norm(dim=1).max()


# The second derivative that the proof starts from


@masks
def test_the_second_derivative_is_that_of_autograd(causal):
    at, X, U = attention(3, 1.5, causal), gaussian(1, 4, 3), gaussian(2, 4, 3)
    first = lambda X: torch.func.jvp(at, (X,), (U,))[1]  # noqa: E731
    expected = torch.func.jvp(first, (X,), (U,))[1]
    torch.testing.assert_close(second_derivative(at, X, U), expected, rtol=1e-11, atol=1e-11)


# No draw exceeds a bound


@quick
@given(seeds, sizes, norms, norms, st.booleans())
def test_no_quotient_of_jacobians_exceeds_the_lipschitz_bound(seed, size, W_norm, radius, causal):
    (n, d), at = size, attention(size[1], W_norm, causal, seed)
    X = tokens(seed + 1, n, d, radius)
    bound = jacobian_lipschitz(W_norm, radius, n)
    for near in (1.0, 1e-3):
        other = X + near * (tokens(seed + 2, n, d, radius) - X)  # the set is convex
        change = (at.at(X).jacobian() - at.at(other).jacobian()).reshape(n * d, n * d)
        # 1e-9: differences of Jacobians of size wρ², rounded.
        rounding = 1e-9 * jacobian_norm(W_norm, radius, n)
        assert float(torch.linalg.matrix_norm(change, 2)) <= bound * float((X - other).norm()) + rounding


@quick
@given(seeds, sizes, norms, norms, st.booleans())
def test_no_jacobian_exceeds_its_bound(seed, size, W_norm, radius, causal):
    at = attention(size[1], W_norm, causal, seed)
    J = at.at(tokens(seed + 1, *size, radius)).jacobian().reshape(math.prod(size), math.prod(size))
    assert float(torch.linalg.matrix_norm(J, 2)) <= jacobian_norm(W_norm, radius, size[0]) * (1 + 1e-12)


@quick
@given(seeds, sizes, norms, norms, st.booleans())
def test_no_third_derivative_exceeds_its_bound(seed, size, W_norm, radius, causal):
    at, X = attention(size[1], W_norm, causal, seed), tokens(seed + 1, *size, radius)
    U = gaussian(seed + 2, *size)
    U = U / U.norm()
    third = torch.func.jvp(lambda X: second_derivative(at, X, U), (X,), (U,))[1]
    assert float(third.norm()) <= third_derivative(W_norm, radius, size[0]) * (1 + 1e-12)


@masks
@pytest.mark.parametrize(
    ("W_norm", "radius", "n", "d"), [(0.1, 1.0, 4, 3), (2.0, 1.0, 4, 3), (1.0, 4.0, 3, 2), (1, 1, 9, 1)]
)
def test_gradient_ascent_does_not_exceed_the_lipschitz_bound(W_norm, radius, n, d, causal):
    generator = torch.Generator().manual_seed(0)
    found = tightness(attention(d, W_norm, causal), radius, n, generator, num_starts=6, steps=80)
    assert found >= 1


def test_two_tokens_and_a_small_w_attain_the_lipschitz_bound():
    """So the constants in front of wρ cannot be smaller; the terms in w² are what is left above 1."""
    at = AttentionMap(torch.tensor([[-1e-4]], dtype=torch.float64))
    found = tightness(at, 1.0, 2, torch.Generator().manual_seed(0), num_starts=8, steps=300)
    assert 1 <= found < 1.001


def test_gradient_ascent_finds_more_than_draws_do():
    at = attention(3, 2.0, False)
    climbed = largest_second_derivative(at, 1.0, 4, torch.Generator().manual_seed(0), num_starts=4, steps=80)
    drawn = largest_second_derivative(at, 1.0, 4, torch.Generator().manual_seed(0), num_starts=100, steps=1)
    assert climbed > 1.5 * drawn


def test_ascent_on_a_quotient_of_jacobians_does_not_exceed_the_bound():
    """The quotient itself, for two tokens of one coordinate, where every score matters."""
    at = AttentionMap(torch.tensor([[-4.0]], dtype=torch.float64))
    X, other = (gaussian(seed, 8, 2, 1).requires_grad_() for seed in (0, 1))
    optimiser = torch.optim.Adam([X, other], lr=0.05, maximize=True)
    jacobians = torch.func.vmap(torch.func.jacrev(at))
    best = 0.0
    for _ in range(60):
        optimiser.zero_grad()
        here, there = X.clamp(-1, 1), other.clamp(-1, 1)
        change = (jacobians(here) - jacobians(there)).reshape(-1, 2, 2)
        quotients = torch.linalg.matrix_norm(change, 2) / (here - there).norm(dim=(1, 2)).clamp_min(1e-6)
        best = max(best, float(quotients.detach().max()))
        quotients.sum().backward()
        optimiser.step()
    assert 1 < best <= jacobian_lipschitz(4.0, 1.0, 2)


# The loss


def loss_of(seed: int, n: int, d: int, R: float, gamma: float = 0.0) -> AttentionLoss:
    """W, V and B of norm R each."""
    V, B = gaussian(seed + 1, d, d), gaussian(seed + 2, n, d)
    V = V * R / torch.linalg.matrix_norm(V, 2)
    return AttentionLoss(attention(d, R, False, seed), V, B * R / B.norm(), gamma)


@quick
@given(seeds, sizes, st.sampled_from([0.3, 1.0, 3.0]))
def test_positive_definiteness_with_our_gamma(seed, size, R):
    """Stands for the paper's lemma that ∇²L ≥ 0; ours has n·R⁸ where the paper has n·d·R⁸."""
    gamma = convexity_gamma(Sizes.all_at_most(R, size[0]))
    H = loss_of(seed, *size, R, gamma).at(tokens(seed + 3, *size, R)).hessian()
    assert float(torch.linalg.eigvalsh(H)[0]) >= -1e-12 * float(torch.linalg.matrix_norm(H, 2))


@quick
@given(seeds, sizes, st.sampled_from([0.3, 1.0, 3.0]))
def test_the_hessian_is_lipschitz(seed, size, R):
    """Stands for the paper's Lipschitz lemma."""
    loss, X = loss_of(seed, *size, R), tokens(seed + 3, *size, R)
    bound = hessian_lipschitz(Sizes.all_at_most(R, size[0]))
    for near in (1.0, 1e-3):
        other = X + near * (tokens(seed + 4, *size, R) - X)
        change = loss.at(X).hessian() - loss.at(other).hessian()
        rounding = 1e-9 * float(loss.at(X).hessian().norm())
        assert float(torch.linalg.matrix_norm(change, 2)) <= bound * float((X - other).norm()) + rounding


# Orders


def test_a_rougher_bound_follows_from_ours():
    for n, w, rho in [(1, 1.0, 1.0), (2, 0.1, 3.0), (16, 5.0, 0.5), (400, 1.0, 9.0)]:
        assert jacobian_lipschitz(w, rho, n) <= math.sqrt(n) * (8 * w**2 * rho**3 + 8 * w * rho)


def test_gammas_grow_like_r_to_the_eighth():
    ours = [convexity_gamma(Sizes.all_at_most(R, 16)) for R in (100.0, 200.0)]
    assert math.log2(ours[1] / ours[0]) == pytest.approx(8, abs=0.01)
    assert paper_gamma(4, 8, 2.0) == 4 * 8 * 256
    wide = [convexity_gamma(Sizes.all_at_most(100.0, n)) for n in (10**8, 2 * 10**8)]
    assert math.log2(wide[1] / wide[0]) == pytest.approx(1, abs=0.01)


def test_lemmas_4_4_and_4_5_hold_on_draws_with_the_papers_norms():
    """‖W‖_F = ‖V‖_F = R > 1, |b_ij| ≤ R, and ‖X‖_F = R."""
    rows = list(measure_bounds(small=True))
    assert all(row["R"] > 1 for row in rows)
    for row in rows:
        size = row["n"], row["d"], row["R"]
        assert 0 < row["negative_eigenvalue"] <= paper_gamma(*size)
        assert 0 < row["hessian_change"] <= paper_lipschitz(*size) == (row["n"] * row["d"]) ** 3 * row["R"] ** 10


def test_bounds_refuse_what_is_no_size():
    with pytest.raises(InputError, match="n at least 1, got n=0"):
        jacobian_lipschitz(1.0, 1.0, 0)
