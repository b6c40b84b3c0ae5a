"""Small systems with known roots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """A x − b."""

    A: Tensor
    b: Tensor

    def residuals(self, xs: Tensor) -> Tensor:
        return xs @ self.A.mT - self.b

    def jacobian(self, x: Tensor) -> Tensor:
        return self.A.clone()


@dataclass(frozen=True)
class Rosenbrock:
    """(10(y − x²), 1 − x): one root (1, 1), behind a curved valley."""

    def residuals(self, xs: Tensor) -> Tensor:
        x, y = xs.unbind(1)
        return torch.stack([10 * (y - x**2), 1 - x], dim=1)

    def jacobian(self, x: Tensor) -> Tensor:
        return torch.tensor([[-20 * float(x[0]), 10.0], [-1.0, 0.0]], dtype=x.dtype)


@dataclass(frozen=True)
class Cubic:
    """x³ − 3x + c in one variable: three roots for |c| < 2, one beyond."""

    c: float = 0.0

    def residuals(self, xs: Tensor) -> Tensor:
        return xs**3 - 3 * xs + self.c

    def jacobian(self, x: Tensor) -> Tensor:
        return (3 * x**2 - 3)[None]

    def jacobians(self, xs: Tensor) -> Tensor:
        return (3 * xs**2 - 3)[:, None]


@dataclass(frozen=True)
class NoRoot:
    """x² + 1: ‖r‖ is least, and stationary, at 0."""

    def residuals(self, xs: Tensor) -> Tensor:
        return xs**2 + 1

    def jacobian(self, x: Tensor) -> Tensor:
        return (2 * x)[None]


def point(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
