"""The one loop: budget, endings, finite numbers, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.solvers.iterate import Ending, iterate


@dataclass(frozen=True)
class Point:
    x: Tensor
    ending: Ending | None = None

    @property
    def value(self) -> float:
        return float(self.x.abs().sum())


@dataclass(frozen=True)
class Scaling:
    """x ← factor·x, until it is below the tolerance."""

    factor: float
    tolerance: float = 1e-3

    def init(self, problem: None, start: Tensor) -> Point:
        return self._point(start)

    def step(self, problem: None, state: Point) -> Point:
        return self._point(self.factor * state.x)

    def _point(self, x: Tensor) -> Point:
        return Point(x, Ending.CONVERGED if bool(x.abs().max() < self.tolerance) else None)


ONE = torch.ones(2, dtype=torch.float64)


def test_it_stops_when_the_state_says_so():
    outcome = iterate(Scaling(0.1), None, ONE, max_steps=50)
    assert outcome.ending is Ending.CONVERGED
    assert outcome.num_steps == 4
    assert outcome.values[0] == 2
    assert len(outcome.values) == 5


def test_a_start_that_is_done_takes_no_step():
    outcome = iterate(Scaling(0.1), None, ONE * 1e-9, max_steps=50)
    assert (outcome.ending, outcome.num_steps, len(outcome.values)) == (Ending.CONVERGED, 0, 1)


def test_the_budget_ends():
    outcome = iterate(Scaling(0.5), None, ONE, max_steps=3)
    assert (outcome.ending, outcome.num_steps) == (Ending.BUDGET, 3)
    assert float(outcome.state.x[0]) == 0.125


def test_an_ending_reached_with_the_last_step_counts():
    assert iterate(Scaling(0.1), None, ONE, max_steps=4).ending is Ending.CONVERGED


def test_the_last_finite_state_is_kept():
    outcome = iterate(Scaling(1e200), None, ONE, max_steps=9)
    assert outcome.ending is Ending.NOT_FINITE
    assert outcome.num_steps == 1
    assert float(outcome.state.x[0]) == 1e200
    assert outcome.values[-1] == 2e200


def test_a_watcher_sees_every_state_it_leaves():
    seen = []
    iterate(Scaling(0.1), None, ONE, max_steps=50, watch=lambda number, state: seen.append((number, state.value)))
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]


def test_endings_are_sentences():
    assert all(ending.value.endswith(".") for ending in Ending)
