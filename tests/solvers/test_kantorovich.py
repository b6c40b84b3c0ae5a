"""The Newton–Kantorovich theorem, on polynomials whose roots are known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.solvers.kantorovich import certify_root

quick = settings(max_examples=200)


def square_root(x: float, a: float):
    """x² − a at x: J = 2x, K = 2 everywhere."""
    return certify_root(1 / abs(2 * x), abs((x * x - a) / (2 * x)), lambda radius: 2.0)


@quick
@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_newton_kantorovich_the_root_is_within_the_radius_and_alone(x, a):
    proof = square_root(x, a)
    if not proof.holds:
        return
    root, other = math.sqrt(a), -math.sqrt(a)
    assert abs(root - x) <= proof.radius * (1 + 1e-9)
    assert abs(other - x) >= proof.unique_within * (1 - 1e-9)


def test_newton_kantorovich_is_sharp_on_a_quadratic():
    """For x² − a both balls end exactly at the two roots: the theorem's extremal case."""
    proof = square_root(1.1, 1.0)
    assert proof.radius == pytest.approx(0.1, rel=1e-9)
    assert proof.unique_within == pytest.approx(2.1, rel=1e-6)


def test_nothing_is_claimed_beyond_one_half():
    proof = square_root(0.1, 1.0)
    assert proof.h > 0.5
    assert not proof.holds
    assert proof.radius == math.inf
    assert proof.unique_within == 0


@pytest.mark.parametrize("inverse_norm", [math.inf, math.nan])
def test_a_singular_jacobian_proves_nothing(inverse_norm):
    assert not certify_root(inverse_norm, 1e-16, lambda radius: 1.0).holds
    assert not certify_root(1.0, math.nan, lambda radius: 1.0).holds


def test_the_ball_of_uniqueness_is_consistent_with_its_own_constant():
    def lipschitz(radius: float) -> float:
        return (1 + radius) ** 3

    proof = certify_root(2.0, 1e-9, lipschitz)
    assert proof.holds
    R = proof.unique_within
    # t₊ of the ball itself: (1 + √(1 − 2h))/(βK(R)) ≈ 2/(βK(R)), as h is 1e-8
    assert pytest.approx(2 / (2 * lipschitz(R)), rel=1e-6) == R
    assert proof.radius == pytest.approx(1e-9, rel=1e-6)


@quick
@given(st.floats(1e-3, 1e3), st.floats(0, 1e-3), st.floats(0.1, 10))
def test_radii_are_ordered(inverse_norm, newton_step, K):
    proof = certify_root(inverse_norm, newton_step, lambda radius: K)
    if proof.holds:
        assert newton_step <= proof.radius * (1 + 1e-12)
        assert proof.radius <= 2 * newton_step
        assert proof.radius <= proof.unique_within * (1 + 1e-9)
