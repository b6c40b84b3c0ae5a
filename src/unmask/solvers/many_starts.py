"""Levenberg–Marquardt from many starts at once: one batch of Jacobians, one damping for each start.

    (JᵀJ + λ·max diag·I) s = −Jᵀ r for every start;  λ falls where ‖r‖ fell, and rises where it did not

Small systems spend their time in calls, not in arithmetic: a batch of 64 costs little more than one.

Notation: as in `levenberg_marquardt.py`; k starts.
Limits: as there; roots are found to about √tolerance's worth of Newton steps, so polish each.
Cost a step: k Jacobians and k Cholesky factorisations of those starts that still move.
Source: Nocedal & Wright, Numerical Optimization, ch. 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.solvers.iterate import Ending


class BatchedSystem(Protocol):
    """r: Rᵐ → Rᵉ with the Jacobians of many points at once."""

    def residuals(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k e"]:
        """r at k points."""

    def jacobians(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k e m"]:
        """∂r/∂x at k points."""


@dataclass(frozen=True)
class ManyStartsState:
    """All points, their residuals and dampings; those that converged or stalled are no longer `moving`."""

    x: Float[Tensor, "k m"]
    residuals: Float[Tensor, "k e"]
    dampings: Float[Tensor, " k"]
    moving: Bool[Tensor, " k"]
    tolerance: float

    @property
    def converged(self) -> Bool[Tensor, " k"]:
        """Which points are roots to the tolerance."""
        return self.residuals.norm(dim=1) <= self.tolerance

    @property
    def value(self) -> float:
        """The smallest ‖r‖ of all."""
        return float(self.residuals.norm(dim=1).min())

    @property
    def ending(self) -> Ending | None:
        """CONVERGED if any start did; the driver goes on while one moves."""
        if self.moving.any():
            return None
        return Ending.CONVERGED if self.converged.any() else Ending.STALLED


@dataclass(frozen=True)
class ManyStarts:
    """Settings; `tolerance` is absolute, on ‖r‖ of each start."""

    tolerance: float
    damping: float = 1e-2
    falls: float = 0.1
    rises: float = 6.0
    most_damping: float = 1e6
    least_decrease: float = 1e-6  # a start whose ‖r‖ falls by less than this share at large damping has stalled

    def init(self, problem: BatchedSystem, start: Float[Tensor, "k m"]) -> ManyStartsState:
        """Residuals only; a start that is not finite does not move."""
        residuals = problem.residuals(start)
        norms = residuals.norm(dim=1)
        moving = norms.isfinite() & (norms > self.tolerance)
        return ManyStartsState(start, residuals, torch.full_like(norms, self.damping), moving, self.tolerance)

    def step(self, problem: BatchedSystem, state: ManyStartsState) -> ManyStartsState:
        """One step of every start that moves."""
        index = state.moving.nonzero()[:, 0]
        x, residuals, dampings = state.x[index], state.residuals[index], state.dampings[index]
        points = x + self._steps(problem.jacobians(x), residuals, dampings)
        tried = problem.residuals(points)
        before, after = residuals.norm(dim=1), tried.norm(dim=1)
        better = after < (1 - self.least_decrease) * before  # NaN is not
        dampings = torch.where(better, dampings * self.falls, dampings * self.rises)
        residuals = torch.where(better[:, None], tried, residuals)
        moving = (residuals.norm(dim=1) > self.tolerance) & (dampings < self.most_damping)
        return ManyStartsState(
            state.x.index_put((index,), torch.where(better[:, None], points, x)),
            state.residuals.index_put((index,), residuals),
            state.dampings.index_put((index,), dampings.clamp(min=1e-14)),
            state.moving.index_put((index,), moving),
            self.tolerance,
        )

    @staticmethod
    def _steps(J: Float[Tensor, "k e m"], residuals: Tensor, dampings: Tensor) -> Float[Tensor, "k m"]:
        gram, slopes = J.mT @ J, (J.mT @ residuals[:, :, None])[:, :, 0]
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_((dampings * diagonal.amax(dim=1))[:, None])
        lower, info = torch.linalg.cholesky_ex(gram)
        steps = -torch.cholesky_solve(slopes[:, :, None], lower)[:, :, 0]
        return torch.where((info == 0)[:, None], steps, torch.zeros_like(steps))
