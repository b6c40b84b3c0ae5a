"""Levenberg–Marquardt: roots of square and of tall systems, second order, honest stalls."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.solvers.systems import Cubic, Linear, NoRoot, Rosenbrock, point

from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

quick = settings(max_examples=25)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(0, 4))
def test_linear_systems_are_solved_as_least_squares_would(seed, size, extra):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(size + extra, size, generator=generator, dtype=torch.float64)
    A[:size] += 3 * torch.eye(size)
    solution = torch.randn(size, generator=generator, dtype=torch.float64)
    outcome = iterate(
        LevenbergMarquardt(1e-10), Linear(A, A @ solution), torch.zeros(size, dtype=A.dtype), max_steps=60
    )
    assert outcome.ending is Ending.CONVERGED
    # ‖x − x*‖ ≤ ‖r‖/σ_min(A)
    least = float(torch.linalg.svdvals(A)[-1])
    assert float((outcome.state.x - solution).norm()) <= 1e-10 / least + 1e-12


def test_a_square_linear_system_takes_one_newton_step():
    A = torch.diag(point(1.0, 1e-6))  # κ² = 1e12: normal equations would lose the small entry
    outcome = iterate(LevenbergMarquardt(1e-12), Linear(A, A @ point(1, 2)), point(0, 0), max_steps=5)
    assert outcome.num_steps == 1
    assert torch.allclose(outcome.state.x, point(1, 2))


@pytest.mark.parametrize("newton", [True, False])
@pytest.mark.parametrize("start", [(-1.2, 1.0), (5.0, -3.0), (0.0, 0.0)])
def test_a_curved_valley_is_followed(start, newton):
    outcome = iterate(LevenbergMarquardt(1e-10, newton=newton), Rosenbrock(), point(*start), max_steps=100)
    assert outcome.ending is Ending.CONVERGED
    assert torch.allclose(outcome.state.x, point(1, 1), atol=1e-8)


def test_convergence_is_of_second_order():
    values = iterate(LevenbergMarquardt(1e-13), Cubic(), point(1.9), max_steps=20).values
    small = [value for value in values if 1e-12 < value < 0.1]
    # r″/(2r′²) = 3x/(3x² − 3)² = 0.14 at the root √3; twice that leaves room for the terms of third order.
    assert all(after <= 0.3 * before**2 + 1e-14 for before, after in pairwise(small))


@given(st.floats(-3, 3))
@quick
def test_the_residual_never_rises(start):
    values = iterate(LevenbergMarquardt(1e-12), Cubic(1.0), point(start), max_steps=40).values
    assert all(after <= before for before, after in pairwise(values))


def test_where_there_is_no_root_it_stalls_and_says_so():
    outcome = iterate(LevenbergMarquardt(1e-12), NoRoot(), point(0.7), max_steps=200)
    assert outcome.ending is Ending.STALLED
    assert outcome.state.value == pytest.approx(1.0, abs=1e-3)


def test_a_start_that_is_a_root_stays():
    outcome = iterate(LevenbergMarquardt(1e-12), Rosenbrock(), point(1, 1), max_steps=5)
    assert outcome.num_steps == 0
    assert outcome.ending is Ending.CONVERGED
