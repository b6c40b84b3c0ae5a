"""Where a Newton step on the paper's loss gets its matrix from: three ways to solve H p = −∇L.

| way | H | cost a step (n tokens, width d) |
| --- | --- | --- |
| `Dense` | ∇²L in closed form | n³d² + (nd)³/3 |
| `GaussNewton` | 2JᵀJ + 2γI: ∇²L where the data are explained, and never indefinite | the same |
| `MatrixFree` | ∇²L, only multiplied with vectors: conjugate gradients | n²d + nd² for each product |

Source: arXiv 2310.12462, Theorem 1.3 (Newton); Nocedal & Wright, Algorithm 7.1 (conjugate gradients that stop at
negative curvature).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.attention_loss import LossPoint


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


@dataclass(frozen=True)
class GaussNewton:
    """The Hessian without the second derivatives of attention."""

    def direction(self, point: LossPoint) -> Float[Tensor, "n d"]:
        """−(2JᵀJ + 2γI)⁻¹∇L: downhill, for γ > 0 or a J of full rank."""
        H = point.gauss_newton()
        H.diagonal().add_(2 * point.loss.gamma)
        return solve(H, point)


@dataclass(frozen=True)
class MatrixFree:
    """Conjugate gradients until ‖H p + ∇L‖ ≤ tolerance·‖∇L‖, negative curvature, or `max_products` products.

    Beyond negative curvature nothing tells how long a step should be: use it with a line search.
    """

    tolerance: float = 1e-10
    max_products: int = 1000

    def direction(self, point: LossPoint) -> Float[Tensor, "n d"]:
        """The last iterate before a direction of negative curvature; −∇L if the first one is. Always downhill."""
        residual = point.gradient
        p = torch.zeros_like(residual)
        way, size = -residual, float(residual.square().sum())
        least = self.tolerance**2 * size
        for _ in range(self.max_products):
            if size <= least:
                break
            product = point.hessian_product(way)
            bend = float((way * product).sum())
            if bend <= 0:
                return p if p.any() else way
            p = p + size / bend * way
            residual = residual + size / bend * product
            size, before = float(residual.square().sum()), size
            way = size / before * way - residual
        return p


def solve(H: Float[Tensor, "nd nd"], point: LossPoint) -> Float[Tensor, "n d"]:
    """−H⁻¹∇L; infinite where H is singular to the last digit."""
    solution, info = torch.linalg.solve_ex(H, -point.gradient.reshape(-1, 1))
    if int(info) != 0:
        solution = torch.full_like(solution, torch.inf)
    return solution.view_as(point.X)
