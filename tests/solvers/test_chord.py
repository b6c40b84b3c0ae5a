"""The chord method: Newton's steps with few Jacobians, and an honest end where they do not get through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unmask.solvers.chord import Chord
from unmask.solvers.iterate import Ending, iterate


@dataclass
class NearlyLinear:
    """r(x) = x + s·sin(x) − c: one root for |s| < 1."""

    strength: float
    num_jacobians: int = 0

    def residuals(self, xs: torch.Tensor) -> torch.Tensor:
        return xs + self.strength * torch.sin(xs) - 1

    def jacobian(self, x: torch.Tensor) -> torch.Tensor:
        self.num_jacobians += 1
        return torch.diag(1 + self.strength * torch.cos(x))


@dataclass
class NoRoot:
    """r(x) = 1 + x²."""

    def residuals(self, xs: torch.Tensor) -> torch.Tensor:
        return 1 + xs**2

    def jacobian(self, x: torch.Tensor) -> torch.Tensor:
        return torch.diag(2 * x)


START = torch.linspace(-1, 1, 7, dtype=torch.float64)


def test_one_jacobian_is_enough_close_to_the_identity():
    problem = NearlyLinear(0.1)
    outcome = iterate(Chord(1e-14), problem, START, max_steps=60)
    assert outcome.ending is Ending.CONVERGED
    assert problem.num_jacobians == 1


def test_a_jacobian_at_hand_is_used():
    problem = NearlyLinear(0.1)
    outcome = iterate(Chord(1e-14, first=torch.eye(7, dtype=torch.float64)), problem, START, max_steps=60)
    assert outcome.ending is Ending.CONVERGED
    assert problem.num_jacobians == 0


def test_jacobians_are_renewed_where_the_old_one_is_slow():
    problem = NearlyLinear(0.9)
    wrong = 9 * torch.eye(7, dtype=torch.float64)
    outcome = iterate(Chord(1e-14, first=wrong), problem, START, max_steps=60)
    assert outcome.ending is Ending.CONVERGED
    assert 0 < problem.num_jacobians < outcome.num_steps + 2


def test_it_stalls_where_there_is_no_root():
    outcome = iterate(Chord(1e-14), NoRoot(), START + 2, max_steps=60)
    assert outcome.ending in (Ending.STALLED, Ending.NOT_FINITE)
