"""Newton's method that never builds J: each step solves J s = −r by GMRES, only as well as the step deserves.

    ‖A(J s + r)‖ ≤ η_k·‖A r‖,   η_k = min(η_max, c·√(‖r_k‖/‖r_0‖))   (A a preconditioner, inexact Newton)

then the step is halved until ‖r‖ falls.

Notation: A ≈ J⁻¹, the problem's own; η_k the forcing term.
Limits: GMRES stalls where A J is ill-conditioned. If what is left of the linear residual exceeds `stalled_share`, the
step is refused and the state ends STALLED with `linear_solve_stalled` set: go to a dense method.
Cost a step: as many products J·u and A·u as GMRES takes, memory for `restart` vectors; no matrix of size m × m.
Source: Dembo, Eisenstat & Steihaug 1982; Eisenstat & Walker 1996; GMRES by scipy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.linalg import LinearOperator, gmres
from torch import Tensor

from unmask.solvers.iterate import Ending, ResidualState

_OVERFLOWS = 1e100  # a preconditioned residual beyond this has no square


class Linearisation(Protocol):
    """The derivative at one point, as products with vectors."""

    def jvp(self, u: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """J u."""

    def precondition(self, r: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """A r with A ≈ J⁻¹."""


class MatrixFreeSystem(Protocol):
    """r: Rᵐ → Rᵐ without a dense Jacobian."""

    def residuals(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
        """r at k points, in one batch."""

    def linearise(self, x: Float[Tensor, " m"]) -> Linearisation | None:
        """The derivative at one point; None where there is no preconditioner."""


@dataclass(frozen=True)
class NewtonKrylovState(ResidualState):
    """A point and its residual; `linear_solve_stalled` says that GMRES was the reason of the ending."""

    first_value: float
    ending: Ending | None = None
    linear_solve_stalled: bool = False


@dataclass(frozen=True)
class NewtonKrylov:
    """Settings; `tolerance` is absolute, on ‖r‖."""

    tolerance: float
    most_forcing: float = 0.1
    forcing_factor: float = 0.1
    restart: int = 60
    max_restarts: int = 4
    stalled_share: float = 0.3  # more than this left of the linear residual: GMRES has failed
    halvings: int = 8

    def init(self, problem: MatrixFreeSystem, start: Float[Tensor, " m"]) -> NewtonKrylovState:
        """Nothing but the residual is computed."""
        residual = problem.residuals(start[None])[0]
        return self._state(start, residual, float(residual.norm()))

    def step(self, problem: MatrixFreeSystem, state: NewtonKrylovState) -> NewtonKrylovState:
        """The longest of s, s/2, s/4, … that makes the residual smaller; STALLED if none does."""
        linear = problem.linearise(state.x)
        forcing = min(self.most_forcing, self.forcing_factor * (state.value / state.first_value) ** 0.5)
        step = None if linear is None else self._solve(linear, state.residual, forcing)
        if step is None:
            return NewtonKrylovState(state.x, state.residual, state.first_value, Ending.STALLED, True)
        share = 1.0
        for _ in range(self.halvings + 1):
            x = state.x + share * step
            residual = problem.residuals(x[None])[0]
            if float(residual.norm()) < (1 - 1e-4 * share) * state.value:
                return self._state(x, residual, state.first_value)
            share /= 2
        return NewtonKrylovState(state.x, state.residual, state.first_value, Ending.STALLED)

    def _solve(self, linear: Linearisation, residual: Tensor, forcing: float) -> Tensor | None:
        """GMRES on A J s = −A r; None if it stalls."""
        size = len(residual)

        def product(u: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return linear.precondition(linear.jvp(torch.from_numpy(u.reshape(-1)))).numpy()

        right = -linear.precondition(residual).numpy()
        if not np.abs(right).max() < _OVERFLOWS:
            return None
        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        restart = min(self.restart, size)
        step, _ = gmres(operator, right, rtol=forcing, restart=restart, maxiter=self.max_restarts)
        left = np.linalg.norm(product(step) - right) / np.linalg.norm(right)
        return torch.from_numpy(step) if left <= self.stalled_share else None  # NaN is refused too

    def _state(self, x: Tensor, residual: Tensor, first_value: float) -> NewtonKrylovState:
        ending = Ending.CONVERGED if float(residual.norm()) <= self.tolerance else None
        return NewtonKrylovState(x, residual, first_value, ending)
