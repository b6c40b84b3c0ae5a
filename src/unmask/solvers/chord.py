"""Newton's method with a Jacobian that is kept as long as it serves (the chord method).

    x⁺ = x − A⁻¹·r(x),   A = J at an earlier point

Each step shrinks the residual by about ‖I − J·A⁻¹‖, for the price of one residual. A Jacobian is computed again only
where a step shrinks it by less than `least_contraction`. Neighbouring positions of a text have similar Jacobians, so
`first` may be that of the position before.

Limits: ends STALLED where a full Newton step does not make the residual smaller; a damped method must take over.
Cost a step: one residual and two triangular solves; with a new Jacobian, that and its LU factors as well.
Source: Ortega & Rheinboldt, Iterative Solution of Nonlinear Equations, 7.1; Kelley, ch. 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.solvers.iterate import Ending, ResidualState, System


@dataclass(frozen=True)
class ChordState(ResidualState):
    """A point, its residual, the factors in use and whether they belong to this very point."""

    factors: tuple[Tensor, Tensor]
    is_fresh: bool
    ending: Ending | None = None


@dataclass(frozen=True)
class Chord:
    """Settings; `tolerance` is absolute, on ‖r‖; `first` is the Jacobian to begin with, if one is at hand."""

    tolerance: float
    first: Float[Tensor, "m m"] | None = None
    least_contraction: float = 0.3

    def init(self, problem: System, start: Float[Tensor, " m"]) -> ChordState:
        """The residual at the start, and the factors of the first Jacobian."""
        jacobian = problem.jacobian(start) if self.first is None else self.first
        residual = problem.residuals(start[None])[0]
        return self._end(ChordState(start, residual, _factors(jacobian), self.first is None))

    def step(self, problem: System, state: ChordState) -> ChordState:
        """One step with the factors at hand; new ones where it does not shrink the residual enough."""
        lu, pivots = state.factors
        x = state.x - torch.linalg.lu_solve(lu, pivots, state.residual[:, None])[:, 0]
        moved = replace(state, x=x, residual=problem.residuals(x[None])[0], is_fresh=False)
        better = moved.value < state.value
        if moved.value <= max(self.least_contraction * state.value, self.tolerance):
            return self._end(moved)
        if state.is_fresh and not better:
            return replace(state, ending=Ending.STALLED)
        best = moved if better else state
        return replace(best, factors=_factors(problem.jacobian(best.x)), is_fresh=True)

    def _end(self, state: ChordState) -> ChordState:
        return replace(state, ending=Ending.CONVERGED) if state.value <= self.tolerance else state


def _factors(jacobian: Float[Tensor, "m m"]) -> tuple[Tensor, Tensor]:
    lu, pivots, _ = torch.linalg.lu_factor_ex(jacobian)  # a singular one gives steps that are not finite
    return lu, pivots
