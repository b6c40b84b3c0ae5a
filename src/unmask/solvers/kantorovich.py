"""Newton–Kantorovich: a small residual and a Lipschitz constant prove that a root is near, and alone.

    β ≥ ‖J(x)⁻¹‖,  η ≥ ‖J(x)⁻¹ r(x)‖,  ‖J(u) − J(v)‖ ≤ K·‖u − v‖ on the ball of radius R around x,  h = β K η
    h ≤ ½  ⇒  a root lies within  t₋ = (1 − √(1 − 2h))/(βK)  of x, if t₋ ≤ R,
              and it is the only one within  t₊ = (1 + √(1 − 2h))/(βK), as far as the ball reaches

K grows with the ball, so the ball is chosen twice: R = 2η ≥ t₋ for existence, and the largest R ≤ t₊(R) for
uniqueness.

Notation: x an approximate root, r its residual, u = 2⁻⁵³.
Limits: float64, not interval arithmetic: rounding of r enters η as a floor that the caller states, rounding of β and K
does not. Says nothing about roots outside the ball.
Cost: given β, η and K(R), none.
Source: Kantorovich 1948; Ortega & Rheinboldt, Iterative Solution of Nonlinear Equations, theorem 12.6.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_BISECTIONS = 60


@dataclass(frozen=True)
class RootCertificate:
    """What was proved about an approximate root.

    A root lies within `radius`; no other one within `unique_within`. Both are infinite, or zero, if h > ½.
    """

    inverse_norm: float  # β
    newton_step: float  # η with its rounding floor
    lipschitz: float  # K on the ball of radius 2η
    radius: float
    unique_within: float

    @property
    def h(self) -> float:
        """β K η."""
        return self.inverse_norm * self.lipschitz * self.newton_step

    @property
    def holds(self) -> bool:
        """Whether there is a root, locally unique."""
        return self.h <= 0.5 and math.isfinite(self.radius)


def certify_root(inverse_norm: float, newton_step: float, lipschitz: Callable[[float], float]) -> RootCertificate:
    """Newton–Kantorovich with a Lipschitz constant that depends on the ball: K(R), not decreasing in R."""
    K = lipschitz(2 * newton_step)
    h = inverse_norm * K * newton_step
    if not h <= 0.5:  # NaN fails
        return RootCertificate(inverse_norm, newton_step, K, math.inf, 0.0)
    # (1 − √(1 − 2h))/(βK) without cancellation
    radius = 2 * newton_step / (1 + math.sqrt(1 - 2 * h))
    unique = _largest_ball(inverse_norm, newton_step, lipschitz, radius)
    return RootCertificate(inverse_norm, newton_step, K, radius, unique)


def _largest_ball(inverse_norm: float, newton_step: float, lipschitz: Callable[[float], float], least: float) -> float:
    """The largest R that is not beyond t₊(R); t₊ falls with R, so bisection finds it."""

    def reached(R: float) -> bool:
        slope = inverse_norm * lipschitz(R)
        h = slope * newton_step
        return h <= 0.5 and R * slope <= 1 + math.sqrt(1 - 2 * h)

    low, high = least, max(2 * least, 1e-300)
    while reached(high) and high < 1e12:
        low, high = high, 4 * high
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high) if low > 0 else high / 2
        low, high = (middle, high) if reached(middle) else (low, middle)
    return low
