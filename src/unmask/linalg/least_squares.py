"""Levenberg–Marquardt by QR, for systems whose last digits count: JᵀJ, which would square the condition, is not formed.

    [J·D⁻¹; √λ·I] z = [−r; 0],    x ← x + D⁻¹ z

Notation: r(x) the residual, J = ∂r/∂x, D the norms of J's columns, λ the damping.
Limits: a local method. Directions of J below 10⁻⁷ of the others are damped.
Cost: a QR of J for every step that is tried.
Source: Moré, 'The Levenberg–Marquardt algorithm', 1978.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.progress import tell_detail

Equations = Callable[[Float[Tensor, " x"]], tuple[Float[Tensor, " e"], Float[Tensor, "e x"]]]
_LEAST_DAMPING, _MOST_DAMPING = 1e-14, 1e6


class Polished(NamedTuple):
    """A point, its residual, and the Jacobian there."""

    x: Float[Tensor, " x"]
    residual: Float[Tensor, " e"]
    J: Float[Tensor, "e x"]

    @property
    def deviation(self) -> float:
        """‖r‖ over the root of the equations that are to spare: the noise of one equation, if the model is right."""
        spare = max(1, len(self.residual) - len(self.x))
        return float(self.residual.norm()) / spare**0.5


def polish_equations(
    equations: Equations,
    x: Float[Tensor, " x"],
    max_steps: int = 40,
    least_decrease: float = 1e-3,
    damping: float = 1e-3,
) -> Polished:
    """The nearest minimum of ‖r‖, until a step makes it smaller by less than the share `least_decrease`.

    `damping` is that of the first step: small where the start is good.
    """
    residual, J = equations(x)
    value = float(residual.norm())
    for _ in range(max_steps):
        tell_detail("solving equations")
        norms = J.norm(dim=0).clamp_min(1e-300)
        rows = torch.cat([J / norms, damping**0.5 * torch.eye(len(x), dtype=J.dtype, device=J.device)])
        right = torch.cat([-residual, torch.zeros_like(x)])[:, None]
        moved = x + torch.linalg.lstsq(rows, right, driver="gels").solution[:, 0] / norms
        there, slope = equations(moved)
        after = float(there.norm())
        if after < value:
            is_done = after > (1 - least_decrease) * value and damping <= 1e-8
            x, residual, J, value = moved, there, slope, after
            damping = max(damping / 30, _LEAST_DAMPING)
            if is_done:
                break
        else:
            damping *= 10
            if not damping <= _MOST_DAMPING or (damping > 1e-2 and value == 0):
                break
    return Polished(x, residual, J)
