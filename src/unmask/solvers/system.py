"""What solvers of r(x) = 0 need of a problem: the residual of many points at once, and its derivative at one."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float
from torch import Tensor


class System(Protocol):
    """r: Rᵐ → Rᵉ. Points and residuals are flat rows."""

    def residuals(self, xs: Float[Tensor, "k m"]) -> Float[Tensor, "k e"]:
        """r at k points, in one batch."""

    def jacobian(self, x: Float[Tensor, " m"]) -> Float[Tensor, "e m"]:
        """∂r/∂x at one point, dense."""
