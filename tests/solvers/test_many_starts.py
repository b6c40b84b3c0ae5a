"""Many starts at once: all roots of a cubic, each start for itself."""

from __future__ import annotations

import pytest
import torch
from tests.solvers.systems import Cubic, point

from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.many_starts import ManyStarts

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")


def test_all_roots_of_a_cubic_are_found():
    starts = torch.linspace(-3, 3, 24, dtype=torch.float64)[:, None]
    outcome = iterate(ManyStarts(1e-12), Cubic(), starts, max_steps=60)
    roots = sorted({round(float(x), 6) for x in outcome.state.x[outcome.state.converged]})
    assert roots == pytest.approx([-(3**0.5), 0.0, 3**0.5], abs=1e-6)
    assert outcome.ending is Ending.CONVERGED


def test_a_start_does_not_depend_on_the_others():
    together = iterate(ManyStarts(1e-12), Cubic(1.0), point(-2.0, 0.1, 2.5)[:, None], max_steps=60).state.x
    alone = [iterate(ManyStarts(1e-12), Cubic(1.0), point(x)[:, None], max_steps=60).state.x for x in (-2.0, 0.1, 2.5)]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-12)


def test_starts_that_are_not_finite_harm_nobody():
    state = ManyStarts(1e-12).init(Cubic(), point(float("nan"), 1.5)[:, None])
    assert state.moving.tolist() == [False, True]


def test_a_stationary_point_is_no_root():
    outcome = iterate(ManyStarts(1e-12), Cubic(5.0), point(1.0)[:, None], max_steps=60)  # r′(1) = 0, r(1) = 3
    assert outcome.ending is Ending.STALLED
    assert not outcome.state.converged.any()
