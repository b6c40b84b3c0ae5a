"""Newton's method on the paper's loss L(X) = ‖F(X)·X·V − B‖² + γ‖X‖².

    X ← X − H⁻¹∇L(X)

Theorem 1.3 of the paper: ‖X_T − X*‖ ≤ ε after T = O(log(‖X₀ − X*‖/ε)) steps. What it needs is that ∇²L ≥ l > 0 with a
Lipschitz constant M around X*, and a start with M‖X₀ − X*‖ well below l; it says nothing about starts further away, and
X* is the minimum of the *regularised* loss. With the exact Hessian the convergence is quadratic: the logarithm of that
logarithm is enough. The logarithm is what a sketched or a Gauss–Newton matrix leaves.

Off unless asked for, as the paper has neither: a line search (the loss then never grows), and a shift of the
eigenvalues (`Dense(least_eigenvalue=…)`: the direction is then downhill).

Limits: without them, Newton's method is drawn to every stationary point, saddles and maxima too.
Cost a step: one gradient and one solve.
Source: arXiv 2310.12462, Theorem 1.3, with the sign of its step corrected; Nocedal & Wright, Algorithm 3.1
(backtracking). `benchmarks/outputs/newton_matrices.py` has other matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.attention_loss import AttentionLoss, LossPoint
from unmask.solvers.iterate import Ending

_LEAST_DECREASE = 1e-4  # of what the slope promises (Armijo)
_HALVINGS = 40
_ROUNDING = 1e-15  # of L: smaller changes are not seen
_STILL_FALLING = 0.25  # of L in one step: no stationary point but a pre-image, where ∇L = 2Jᵀc is small as c is
_EPS = torch.finfo(torch.float64).eps


class NewtonMatrix(Protocol):
    """One way."""

    def direction(self, point: LossPoint) -> Float[Tensor, "n d"]:
        """p with H p = −∇L, or as near as this way comes; not finite where H is singular."""


@dataclass(frozen=True)
class Dense:
    """The whole Hessian. With `least_eigenvalue`, H + σI with the smallest σ ≥ 0 that leaves no eigenvalue below it.

    Where it shifts, steps may be long, up to ‖∇L‖/least_eigenvalue: use it with a line search.
    """

    least_eigenvalue: float | None = None

    def direction(self, point: LossPoint) -> Float[Tensor, "n d"]:
        """−H⁻¹∇L by LU, as H may be indefinite; that is what the paper does, who takes H for positive definite."""
        H = point.hessian()
        if self.least_eigenvalue is not None and bool(H.isfinite().all()):
            lowest = float(torch.linalg.eigvalsh(H)[0])
            H.diagonal().add_(max(0.0, self.least_eigenvalue - lowest))
        return solve(H, point)


def solve(H: Float[Tensor, "nd nd"], point: LossPoint) -> Float[Tensor, "n d"]:
    """−H⁻¹∇L; infinite where H is singular to the last digit."""
    solution, info = torch.linalg.solve_ex(H, -point.gradient.reshape(-1, 1))
    if int(info) != 0:
        solution = torch.full_like(solution, torch.inf)
    return solution.view_as(point.X)


@dataclass(frozen=True)
class NewtonState:
    """A point with its derivatives."""

    point: LossPoint
    ending: Ending | None = None

    @property
    def x(self) -> Float[Tensor, "n d"]:
        """X."""
        return self.point.X

    @property
    def value(self) -> float:
        """L(X)."""
        return self.point.value


@dataclass(frozen=True)
class Newton:
    """Settings; γ is part of the loss. `tolerance` is on ‖∇L‖, relative to 2(‖V‖‖B‖ + γ‖X‖)."""

    tolerance: float = 1e-13
    matrix: NewtonMatrix = field(default_factory=Dense)
    line_search: bool = False

    def init(self, problem: AttentionLoss, start: Float[Tensor, "n d"]) -> NewtonState:
        """The start."""
        return self._state(problem, start)

    def step(self, problem: AttentionLoss, state: NewtonState) -> NewtonState:
        """One step; STALLED if the line search finds nothing lower, CONVERGED if none that falls at a flat point."""
        direction = self.matrix.direction(state.point)
        X = _lower(problem, state.point, direction) if self.line_search else state.x + direction
        following = NewtonState(state.point, Ending.STALLED) if X is None else self._state(problem, X)
        if self._is_flat(state.point) and not following.value < _STILL_FALLING * state.value:
            return NewtonState(state.point, Ending.CONVERGED)
        return following

    def _state(self, problem: AttentionLoss, X: Float[Tensor, "n d"]) -> NewtonState:
        point = problem.at(X)
        done = float(point.c.norm()) <= _EPS * float(problem.B.norm()) and self._is_flat(point)
        return NewtonState(point, Ending.CONVERGED if done else None)

    def _is_flat(self, point: LossPoint) -> bool:
        """Whether ∇L is at the tolerance. Where J is nearly singular, L may still fall by many digits from there."""
        loss = point.loss
        scale = 2 * (loss.V.norm() * loss.B.norm() + loss.gamma * point.X.norm())
        return bool(point.gradient.norm() <= self.tolerance * scale)


def _lower(problem: AttentionLoss, point: LossPoint, direction: Float[Tensor, "n d"]) -> Float[Tensor, "n d"] | None:
    """The longest of 1, ½, ¼, … of the direction, turned downhill, that makes L enough smaller; tried in one batch."""
    slope = float((point.gradient * direction).sum())
    shares = 0.5 ** torch.arange(_HALVINGS, dtype=point.X.dtype, device=point.X.device)
    ways = point.X + torch.where(direction.new_tensor(slope) > 0, -direction, direction) * shares[:, None, None]
    highest = point.value * (1 + _ROUNDING) - _LEAST_DECREASE * abs(slope) * shares
    enough = (problem(ways) <= highest).nonzero()
    return ways[int(enough[0])] if len(enough) else None
