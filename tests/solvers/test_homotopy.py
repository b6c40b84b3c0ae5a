"""The fixed-point homotopy: turning points are passed, roots beyond the first are met, lost curves are told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.solvers.systems import Cubic, Linear, NoRoot, point

from unmask.solvers.homotopy import FixedPointHomotopy
from unmask.solvers.iterate import Ending, iterate

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

quick = settings(max_examples=25)


@quick
@given(st.floats(-3, 3), st.floats(-1.9, 1.9))
def test_degree_a_cubic_is_solved_from_anywhere(start, c):
    """x³ − 3x + c grows at both ends, so its degree is 1 and the curve from any start reaches a root."""
    outcome = iterate(FixedPointHomotopy(1e-11), Cubic(c), point(start), max_steps=300)
    assert outcome.ending is Ending.CONVERGED
    assert abs(float(Cubic(c).residuals(outcome.state.x[None]))) <= 1e-11


def test_a_turning_point_is_passed():
    """From x₀ = 2.5 the curve to the only root of x³ − 3x + 3, at −2.1, turns back in τ where the maps fold."""
    outcome = iterate(FixedPointHomotopy(1e-11), Cubic(3.0), point(2.5), max_steps=300)
    assert outcome.ending is Ending.CONVERGED
    assert float(outcome.state.x) == pytest.approx(-2.1038, abs=1e-3)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_linear_systems_with_positive_symmetric_part(seed, size):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(size, size, generator=generator, dtype=torch.float64)
    A = A @ A.mT + torch.eye(size) + (A - A.mT)
    root = torch.randn(size, generator=generator, dtype=A.dtype)
    outcome = iterate(FixedPointHomotopy(1e-9), Linear(A, A @ root), torch.zeros_like(root), max_steps=100)
    assert outcome.ending is Ending.CONVERGED
    assert float((outcome.state.x - root).norm()) <= 1e-9 + 1e-12  # ‖A⁻¹‖ ≤ 1


def test_a_curve_that_leads_nowhere_is_told():
    outcome = iterate(FixedPointHomotopy(1e-11), NoRoot(), point(0.3), max_steps=300)
    assert outcome.ending is not Ending.CONVERGED
    assert outcome.state.roots == ()


def test_a_start_that_is_a_root_stays():
    outcome = iterate(FixedPointHomotopy(1e-11), Cubic(2.0), point(1.0), max_steps=5)
    assert outcome.num_steps == 0
    assert len(outcome.state.roots) == 1
