"""Levenberg–Marquardt for r(x) = 0, several dampings tried in one batch.

    (JᵀJ + λ·diag·I) s = −Jᵀ r,   λ from a short ladder around the last one that worked

The data are exact, so the residual is zero at the solution and ∇²‖r‖² = 2JᵀJ there: no second derivatives are needed,
and with λ → 0 the steps are Newton's, of second order. A square J is then solved by LU, whose error grows with κ(J)
and not with κ(J)².

Limits: ends at a stationary point of ‖r‖² (STALLED) where J is singular; finds *a* root, whichever the start leads to.
Cost a step: one Jacobian, one factorisation for each damping of the ladder, one batch of residuals.
Source: Nocedal & Wright, Numerical Optimization, ch. 10; the ladder replaces the inner loop over λ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.solvers.iterate import Ending
from unmask.solvers.system import System


@dataclass(frozen=True)
class LeastSquaresState:
    """A point, its residual, and the damping that led to it."""

    x: Float[Tensor, " m"]
    residual: Float[Tensor, " e"]
    damping: float
    ending: Ending | None = None

    @property
    def value(self) -> float:
        """‖r‖."""
        return float(self.residual.norm())


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Settings; `tolerance` is absolute, on ‖r‖.

    `damping` is relative to the largest entry of diag(JᵀJ). With `newton`, the undamped step of a square J is one rung
    of the ladder.
    """

    tolerance: float
    damping: float = 1e-2
    ladder: tuple[float, ...] = (1e-3, 1e-1, 1.0, 10.0, 1e3)
    least_decrease: float = 1e-4  # a step must make ‖r‖ smaller by this share, or the solver stalls
    most_damping: float = 1e6
    newton: bool = True

    def init(self, problem: System, start: Float[Tensor, " m"]) -> LeastSquaresState:
        """Nothing but the residual is computed."""
        residual = problem.residuals(start[None])[0]
        return self._state(start, residual, self.damping)

    def step(self, problem: System, state: LeastSquaresState) -> LeastSquaresState:
        """The best point of the ladder, or STALLED at the old one."""
        J = problem.jacobian(state.x)
        steps, dampings = self._steps(J, state)
        points = state.x + steps
        residuals = problem.residuals(points)
        norms = residuals.norm(dim=1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        best = int(norms.argmin())
        if float(norms[best]) >= (1 - self.least_decrease) * state.value:
            stalled = Ending.STALLED if state.damping > self.most_damping else None
            return LeastSquaresState(state.x, state.residual, max(dampings) * 10, stalled)
        return self._state(points[best], residuals[best], max(dampings[best], 1e-14))

    def _steps(self, J: Float[Tensor, "e m"], state: LeastSquaresState) -> tuple[Float[Tensor, "k m"], list[float]]:
        """Steps of all dampings whose system can be solved."""
        gram, slope = J.mT @ J, J.mT @ state.residual
        scale = float(gram.diagonal().max())
        steps, dampings = [], []
        if self.newton and J.shape[0] == J.shape[1]:
            step, info = torch.linalg.solve_ex(J, -state.residual)
            if not info:
                steps.append(step)
                dampings.append(state.damping * 1e-2)
        for factor in self.ladder:
            damped = gram.clone()
            damped.diagonal().add_(state.damping * factor * scale)
            lower, info = torch.linalg.cholesky_ex(damped)
            if not info:
                steps.append(-torch.cholesky_solve(slope[:, None], lower)[:, 0])
                dampings.append(state.damping * factor)
        return torch.stack(steps), dampings

    def _state(self, x: Tensor, residual: Tensor, damping: float) -> LeastSquaresState:
        ending = Ending.CONVERGED if float(residual.norm()) <= self.tolerance else None
        return LeastSquaresState(x, residual, damping, ending)
