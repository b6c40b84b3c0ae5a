"""Fixed-point homotopy by pseudo-arclength: from a start that needs not be near, along a curve, to a root.

    H(x, τ) = (1 − τ)(x − x₀) + τ·r(x) = 0,   from (x₀, 0) to τ = 1

The curve may turn back in τ, so it is followed by its length: predict along the unit tangent v, correct by Newton on
H = 0 and vᵀ(z − z_predicted) = 0 with z = (x, τ). Each time that τ passes 1, the point is polished and kept as a root.

Notation: x₀ the start; ds the arclength of one prediction.
Limits: reaches a root if the curve stays bounded, which a degree argument shows (docs/outputs-solvers.md) where
sym(W) ≻ 0; else it may run off (STALLED). Needs a square system. The curve is regular for almost every x₀, not all.
Cost a step: one dense factorisation of size m + 1 for each correction, 2–4 of them.
Source: Allgower & Georg, Numerical Continuation Methods, ch. 2, 6 and 11.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.solvers.iterate import Ending, System, iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt


@dataclass(frozen=True)
class HomotopyState:
    """Where the curve is: the point, τ, the unit tangent, the next arclength, and the roots that it passed."""

    x: Float[Tensor, " m"]
    anchor: Float[Tensor, " m"]
    tau: float
    tangent: Float[Tensor, " m+1"]
    arclength: float
    value: float
    roots: tuple[Float[Tensor, " m"], ...] = ()
    ending: Ending | None = None


@dataclass(frozen=True)
class FixedPointHomotopy:
    """Settings; `tolerance` is absolute, on ‖r‖ of a root; arclengths are relative to ‖x₀‖ + 1.

    The curve is left after `num_roots` passages of τ = 1: beyond the first it may come back, and each return is another
    root.
    """

    tolerance: float
    num_roots: int = 1
    first_arclength: float = 0.05
    most_arclength: float = 0.5
    least_arclength: float = 1e-7
    max_corrections: int = 5
    correction_tolerance: float = 1e-7
    farthest: float = 1e3  # times ‖x₀‖ + 1: beyond it the curve counts as lost
    most_tau: float = 10.0

    def init(self, problem: System, start: Float[Tensor, " m"]) -> HomotopyState:
        """At τ = 0 the derivative of H in x is the identity: the tangent is −(r(x₀), −1), scaled."""
        residual = problem.residuals(start[None])[0]
        value = float(residual.norm())
        tangent = torch.cat([-residual, residual.new_ones(1)])
        ending = Ending.CONVERGED if value <= self.tolerance else None
        roots = (start,) if ending else ()
        first = self.first_arclength * self._scale(start)
        return HomotopyState(start, start, 0.0, tangent / tangent.norm(), first, value, roots, ending)

    def step(self, problem: System, state: HomotopyState) -> HomotopyState:
        """One prediction and its corrections; a shorter arclength if they do not converge."""
        scale = self._scale(state.anchor)
        corrected = self._correct(problem, state)
        if corrected is None:
            shorter = state.arclength / 2
            lost = Ending.STALLED if shorter < self.least_arclength * scale else None
            return replace(state, arclength=shorter, ending=lost)
        point, num_corrections = corrected
        x, tau = point[:-1], float(point[-1])
        value = float(problem.residuals(x[None]).norm())
        roots = state.roots
        if (state.tau - 1) * (tau - 1) <= 0 and tau != state.tau:
            share = (1 - state.tau) / (tau - state.tau)
            root = self._polish(problem, state.x + share * (x - state.x))
            roots = roots if root is None else (*roots, root)
        if len(roots) >= self.num_roots:
            value = float(problem.residuals(roots[-1][None]).norm())
            return replace(state, x=roots[-1], tau=1.0, value=value, roots=roots, ending=Ending.CONVERGED)
        if tau < 0 or tau > self.most_tau or float(x.norm()) > self.farthest * scale:
            return replace(state, roots=roots, ending=Ending.STALLED)
        arclength = min(state.arclength * (1.5 if num_corrections <= 3 else 1.0), self.most_arclength * scale)
        derivative = self._derivative(problem, x, tau, state.anchor)
        tangent = _tangent(derivative, state.tangent)
        if tangent is None:
            return replace(state, roots=roots, ending=Ending.STALLED)
        return HomotopyState(x, state.anchor, tau, tangent, arclength, value, roots)

    def _correct(self, problem: System, state: HomotopyState) -> tuple[Tensor, int] | None:
        """Newton on H = 0 in the plane of the prediction; None if it does not converge at once."""
        z = torch.cat([state.x, state.x.new_tensor([state.tau])]) + state.arclength * state.tangent
        for count in range(1, self.max_corrections + 1):
            x, tau = z[:-1], float(z[-1])
            H = (1 - tau) * (x - state.anchor) + tau * problem.residuals(x[None])[0]
            bordered = torch.cat([self._derivative(problem, x, tau, state.anchor), state.tangent[None]])
            correction, info = torch.linalg.solve_ex(bordered, -torch.cat([H, H.new_zeros(1)]))
            if info or not correction.isfinite().all():
                return None
            if count == 1 and float(correction.norm()) > 0.5 * state.arclength:
                return None  # the curve bends more than the prediction allows
            z = z + correction
            if float(correction.norm()) <= self.correction_tolerance * (1 + float(z.norm())):
                return z, count
        return None

    def _derivative(self, problem: System, x: Tensor, tau: float, anchor: Tensor) -> Float[Tensor, "m m+1"]:
        """∂H/∂(x, τ)."""
        in_x = tau * problem.jacobian(x)
        in_x.diagonal().add_(1 - tau)
        in_tau = problem.residuals(x[None])[0] - (x - anchor)
        return torch.cat([in_x, in_tau[:, None]], dim=1)

    def _polish(self, problem: System, x: Tensor) -> Tensor | None:
        """The root next to a point of the curve near τ = 1."""
        outcome = iterate(LevenbergMarquardt(self.tolerance), problem, x, max_steps=20)
        return outcome.state.x if outcome.ending is Ending.CONVERGED else None

    @staticmethod
    def _scale(anchor: Tensor) -> float:
        return float(anchor.norm()) + 1


def _tangent(derivative: Float[Tensor, "m m+1"], previous: Float[Tensor, " m+1"]) -> Float[Tensor, " m+1"] | None:
    """The unit kernel vector that goes on in the direction of the previous one."""
    bordered = torch.cat([derivative, previous[None]])
    ahead = torch.zeros_like(previous)
    ahead[-1] = 1
    tangent, info = torch.linalg.solve_ex(bordered, ahead)
    return None if info or not tangent.isfinite().all() else tangent / tangent.norm()
