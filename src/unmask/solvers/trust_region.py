"""Powell's dogleg for r(x) = 0: Newton's step, cut to the region in which the linear model was right.

    p_N = −J⁻¹ r (least squares if J is not square),   p_C = −(‖g‖²/‖Jg‖²)·g,   g = Jᵀ r
    the step is where the path 0 → p_C → p_N leaves the ball ‖p‖ ≤ Δ

Δ grows while the model predicts ‖r‖² well and shrinks while it does not.

Notation: Δ the radius of the region; ρ = actual / predicted decrease of ‖r‖².
Limits: as Levenberg–Marquardt: a stationary point of ‖r‖² where J is singular ends it (STALLED).
Cost a step: one Jacobian and one factorisation; a refused step is followed by another Δ on the same point, which costs
them again (the driver owns the loop).
Source: Powell 1970; Nocedal & Wright, Numerical Optimization, algorithm 11.5 and section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.solvers.iterate import Ending, ResidualState, System


@dataclass(frozen=True)
class TrustRegionState(ResidualState):
    """A point, its residual, and the radius in which its linear model is believed."""

    radius: float
    ending: Ending | None = None


@dataclass(frozen=True)
class Dogleg:
    """Settings; `tolerance` is absolute, on ‖r‖. The first radius is that share of the start's norm (or 1)."""

    tolerance: float
    first_radius_share: float = 0.3
    accepted: float = 1e-4  # least ρ of a step that is taken
    believed: float = 0.75  # above it the region grows
    doubted: float = 0.25  # below it the region shrinks
    least_radius: float = 1e-14  # relative to ‖x‖ + 1; below it the solver stalls

    def init(self, problem: System, start: Float[Tensor, " m"]) -> TrustRegionState:
        """Nothing but the residual is computed."""
        radius = self.first_radius_share * (float(start.norm()) or 1.0)
        return self._state(start, problem.residuals(start[None])[0], radius)

    def step(self, problem: System, state: TrustRegionState) -> TrustRegionState:
        """The dogleg's point, or the old one with a smaller region."""
        J = problem.jacobian(state.x)
        step = dogleg_step(J, state.residual, state.radius)
        predicted = state.value**2 - float((state.residual + J @ step).square().sum())
        residual = problem.residuals((state.x + step)[None])[0]
        gain = (state.value**2 - float(residual.square().sum())) / max(predicted, 1e-300)
        length = float(step.norm())
        if not gain > self.accepted:  # also where the residual is not finite
            radius = 0.25 * length
            stalled = Ending.STALLED if radius <= self.least_radius * (float(state.x.norm()) + 1) else None
            return TrustRegionState(state.x, state.residual, radius, stalled)
        radius = state.radius
        if gain > self.believed:
            radius = max(radius, 2 * length)
        elif gain < self.doubted:
            radius = 0.25 * length
        return self._state(state.x + step, residual, radius)

    def _state(self, x: Tensor, residual: Tensor, radius: float) -> TrustRegionState:
        ending = Ending.CONVERGED if float(residual.norm()) <= self.tolerance else None
        return TrustRegionState(x, residual, radius, ending)


def dogleg_step(J: Float[Tensor, "e m"], residual: Float[Tensor, " e"], radius: float) -> Float[Tensor, " m"]:
    """Where the path from 0 over the steepest descent's best point to Newton's point leaves the ball."""
    slope = J.mT @ residual
    newton = _newton_step(J, residual)
    if newton is not None and float(newton.norm()) <= radius:
        return newton
    curvature = float((J @ slope).square().sum())
    cauchy = -slope * (float(slope.square().sum()) / curvature if curvature > 0 else 0.0)
    if newton is None or float(cauchy.norm()) >= radius:
        return cauchy * min(1.0, radius / max(float(cauchy.norm()), 1e-300))
    return cauchy + _to_sphere(cauchy, newton - cauchy, radius) * (newton - cauchy)


def _newton_step(J: Tensor, residual: Tensor) -> Tensor | None:
    """J⁻¹ r or its least-squares counterpart; None where J is singular."""
    if J.shape[0] == J.shape[1]:
        step, info = torch.linalg.solve_ex(J, -residual)
        singular = bool(info)
    else:
        step, singular = torch.linalg.lstsq(J, -residual[:, None]).solution[:, 0], False
    return None if singular or not step.isfinite().all() else step


def _to_sphere(inside: Tensor, direction: Tensor, radius: float) -> float:
    """The t in [0, 1] with ‖inside + t·direction‖ = radius."""
    a, b = float(direction @ direction), float(inside @ direction)
    c = float(inside @ inside) - radius**2
    return (-b + max(b * b - a * c, 0.0) ** 0.5) / a if a > 0 else 0.0
