"""Levenberg–Marquardt for r(x) = 0: Newton's step first, several dampings in one batch where it fails.

    J s = −r                              while these steps at least halve ‖r‖ (square J, one LU)
    (JᵀJ + λ·max diag·I) s = −Jᵀ r        otherwise, λ from a short ladder around the last one that worked

The data are exact, so the residual is zero at the solution and ∇²‖r‖² = 2JᵀJ there: no second derivatives are needed,
and near the solution the steps are Newton's, of second order. LU's error grows with κ(J) and not with κ(J)².

Notation: J = ∂r/∂x (e, m); λ the damping, relative to the largest entry of diag(JᵀJ).
Limits: ends at a stationary point of ‖r‖² (STALLED) where J is singular; finds *a* root, whichever the start leads to.
Cost a step: one Jacobian and one LU; where Newton's step is refused, one Cholesky factorisation for each damping and
one batch of residuals more. Newton's step is not tried right after it was refused.
Source: Nocedal & Wright, Numerical Optimization, ch. 10; the ladder replaces the inner loop over λ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.solvers.iterate import Ending, ResidualState, System

_LEAST_DAMPING = 1e-14  # below it the damped step is Newton's


@dataclass(frozen=True)
class LeastSquaresState(ResidualState):
    """A point, its residual, the damping that led to it, and whether Newton's step is worth a try."""

    damping: float
    ending: Ending | None = None
    try_newton: bool = True


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Settings; `tolerance` is absolute, on ‖r‖.

    `damping` is relative to the largest entry of diag(JᵀJ). With `newton`, undamped steps of a square J are taken as
    long as each makes ‖r‖ smaller by the factor `newton_decrease`.
    """

    tolerance: float
    damping: float = 1e-2
    ladder: tuple[float, ...] = (1e-3, 1e-1, 1.0, 10.0, 1e3)
    least_decrease: float = 1e-4  # a step must make ‖r‖ smaller by this share, or the solver stalls
    most_damping: float = 1e6
    newton: bool = True
    newton_decrease: float = 0.5

    def init(self, problem: System, start: Float[Tensor, " m"]) -> LeastSquaresState:
        """Nothing but the residual is computed."""
        residual = problem.residuals(start[None])[0]
        return self._state(start, residual, self.damping)

    def step(self, problem: System, state: LeastSquaresState) -> LeastSquaresState:
        """Newton's point if it is good; else the best point of the ladder, or STALLED at the old one."""
        J = problem.jacobian(state.x)
        if self.newton and state.try_newton and J.shape[0] == J.shape[1]:
            following = self._newton(problem, J, state)
            if following is not None:
                return following
        steps, dampings = self._ladder(J, state)
        points = state.x + steps
        residuals = problem.residuals(points)
        norms = residuals.norm(dim=1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        if len(norms) == 0 or float(norms.min()) >= (1 - self.least_decrease) * state.value:
            stalled = Ending.STALLED if state.damping > self.most_damping else None
            return LeastSquaresState(state.x, state.residual, state.damping * max(self.ladder) * 10, stalled, False)
        best = int(norms.argmin())
        halved = float(norms[best]) <= self.newton_decrease * state.value
        return self._state(points[best], residuals[best], max(dampings[best], _LEAST_DAMPING), halved)

    def _newton(self, problem: System, J: Float[Tensor, "m m"], state: LeastSquaresState) -> LeastSquaresState | None:
        """The state after the undamped step, or None if that step is not good."""
        step, info = torch.linalg.solve_ex(J, -state.residual)
        if info or not step.isfinite().all():
            return None
        residual = problem.residuals((state.x + step)[None])[0]
        if not float(residual.norm()) <= self.newton_decrease * state.value:
            return None
        return self._state(state.x + step, residual, max(state.damping * 1e-2, _LEAST_DAMPING))

    def _ladder(self, J: Float[Tensor, "e m"], state: LeastSquaresState) -> tuple[Float[Tensor, "k m"], list[float]]:
        """Steps of all dampings whose system can be solved."""
        gram, slope = J.mT @ J, J.mT @ state.residual
        scale = float(gram.diagonal().max())
        steps, dampings = [], []
        for factor in self.ladder:
            damped = gram.clone()
            damped.diagonal().add_(state.damping * factor * scale)
            lower, info = torch.linalg.cholesky_ex(damped)
            if not info:
                steps.append(-torch.cholesky_solve(slope[:, None], lower)[:, 0])
                dampings.append(state.damping * factor)
        return (torch.stack(steps) if steps else state.x[None][:0]), dampings

    def _state(self, x: Tensor, residual: Tensor, damping: float, try_newton: bool = True) -> LeastSquaresState:
        ending = Ending.CONVERGED if float(residual.norm()) <= self.tolerance else None
        return LeastSquaresState(x, residual, damping, ending, try_newton)
