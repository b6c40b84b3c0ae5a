"""Powell's dogleg: the step's shape, and roots."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.solvers.systems import Cubic, Linear, NoRoot, Rosenbrock, point

from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.trust_region import Dogleg, dogleg_step

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")

quick = settings(max_examples=40)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 3), st.floats(1e-3, 1e3))
def test_a_step_stays_in_the_region_and_makes_the_model_smaller(seed, size, extra, radius):
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(size + extra, size, generator=generator, dtype=torch.float64)
    residual = torch.randn(size + extra, generator=generator, dtype=torch.float64)
    step = dogleg_step(J, residual, radius)
    assert float(step.norm()) <= radius * (1 + 1e-12)
    assert float((residual + J @ step).norm()) <= float(residual.norm())
    assert float(step @ (J.mT @ residual)) <= 0  # downhill


def test_a_large_region_gives_newtons_step_and_a_small_one_the_gradients():
    J, residual = torch.diag(point(1.0, 10.0)), point(1.0, 1.0)
    assert torch.allclose(dogleg_step(J, residual, 100.0), point(-1.0, -0.1))
    slope = J.mT @ residual
    assert torch.allclose(dogleg_step(J, residual, 1e-3), -1e-3 * slope / slope.norm())


def test_a_singular_jacobian_leaves_the_gradients_step():
    J = torch.zeros(2, 2, dtype=torch.float64)
    J[0, 0] = 1.0
    assert torch.allclose(dogleg_step(J, point(1.0, 1.0), 10.0), point(-1.0, 0.0))


@pytest.mark.parametrize("start", [(-1.2, 1.0), (5.0, -3.0), (0.0, 0.0)])
def test_a_curved_valley_is_followed(start):
    outcome = iterate(Dogleg(1e-10), Rosenbrock(), point(*start), max_steps=100)
    assert outcome.ending is Ending.CONVERGED
    assert torch.allclose(outcome.state.x, point(1, 1), atol=1e-8)


def test_a_tall_linear_system_is_solved():
    A = point(1, 2, 3, 4, 5, 7).reshape(3, 2)
    outcome = iterate(Dogleg(1e-10), Linear(A, A @ point(1, -1)), point(0, 0), max_steps=30)
    assert outcome.ending is Ending.CONVERGED
    assert torch.allclose(outcome.state.x, point(1, -1), atol=1e-9)


@given(st.floats(-3, 3))
@quick
def test_the_residual_never_rises(start):
    values = iterate(Dogleg(1e-12), Cubic(1.0), point(start), max_steps=60).values
    assert all(after <= before for before, after in pairwise(values))


def test_where_there_is_no_root_it_stalls_and_says_so():
    assert iterate(Dogleg(1e-12), NoRoot(), point(0.7), max_steps=300).ending is Ending.STALLED
