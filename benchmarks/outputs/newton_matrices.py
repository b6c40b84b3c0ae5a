"""Other matrices for a Newton step on the paper's loss: Gauss–Newton, by products alone, and from sampled rows of J.

    H ≈ 2JᵀSJ + 2γI,   S samples rows of J and scales them, so that E[JᵀSJ] = JᵀJ

The paper's theorem has a probability of failure δ, though nothing in its exact step is random. This is a step for
which that makes sense: rows drawn in proportion to their leverage give (1 − ε)JᵀJ ≤ JᵀSJ ≤ (1 + ε)JᵀJ with
probability 1 − δ as soon as there are `sketch_size` of them. That is more rows than J has unless e ≫ d: where J is
nearly square, the exact product is cheaper.
Source: arXiv 2310.12462, Theorem 1.3; Tropp, arXiv 1004.4389, Theorem 1.1 (matrix Chernoff); the samplers are Drineas
et al.'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError
from unmask.linalg.attention_loss import LossPoint
from unmask.solvers.newton import solve


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
            product = hessian_product(point, way)
            bend = float((way * product).sum())
            if bend <= 0:
                return p if p.any() else way
            p = p + size / bend * way
            residual = residual + size / bend * product
            size, before = float(residual.square().sum()), size
            way = size / before * way - residual
        return p


class Sampling(Enum):
    """What a row's probability is proportional to. The value of a member is what it means."""

    LEVERAGE = "The row's squared norm after J's columns are made orthonormal: sketch_size holds with dimension nd."
    NORMS = "The row's squared norm: cheap, and sketch_size holds with dimension ‖J‖_F²/σ_min(J)², often far larger."


@dataclass(frozen=True)
class SampledRows:
    """`num_rows` rows of J, drawn with replacement and scaled so that the mean of JᵀSJ is JᵀJ."""

    num_rows: int
    sampling: Sampling = Sampling.LEVERAGE
    seed: int = 0

    def direction(self, point: LossPoint) -> Float[Tensor, "n d"]:
        """−(2JᵀSJ + 2γI)⁻¹∇L."""
        J = torch.einsum("iamb,ae->iemb", point.attention.jacobian(), point.loss.V).reshape(-1, point.X.numel())
        if not J.isfinite().all():
            return torch.full_like(point.X, torch.inf)
        generator = torch.Generator().manual_seed(self.seed)
        rows = sample_rows(J, row_probabilities(J, self.sampling), self.num_rows, generator)
        H = 2 * rows.mT @ rows
        H.diagonal().add_(2 * point.loss.gamma)
        return solve(H, point)


def row_probabilities(J: Float[Tensor, "rows k"], sampling: Sampling) -> Float[Tensor, " rows"]:
    """Probabilities of the rows; those of leverage need J to have full column rank, which QR takes for granted."""
    scores = torch.linalg.qr(J)[0] if sampling is Sampling.LEVERAGE else J
    squares = scores.square().sum(1)
    return squares / squares.sum()


def sample_rows(
    J: Float[Tensor, "rows k"], probabilities: Float[Tensor, " rows"], num_rows: int, generator: torch.Generator
) -> Float[Tensor, "num_rows k"]:
    """Rows j/√(num_rows·p_j), so that the mean of their Gram matrix is JᵀJ."""
    chosen = probabilities.multinomial(num_rows, replacement=True, generator=generator)
    return J[chosen] / (num_rows * probabilities[chosen]).sqrt()[:, None]


def sketch_size(dimension: float, epsilon: float, delta: float) -> int:
    """Rows that give (1 − ε)JᵀJ ≤ JᵀSJ ≤ (1 + ε)JᵀJ with probability at least 1 − δ: 3·dimension/ε²·ln(2·dimension/δ).

    With J's columns made orthonormal each draw is a matrix j jᵀ/p_j of norm at most `dimension` and mean I. Matrix
    Chernoff: the smallest eigenvalue of their mean is below 1 − ε with probability at most k·exp(−mε²/(2·dimension)),
    the largest above 1 + ε with at most k·exp(−mε²/(3·dimension)), for k ≤ dimension unknowns and ε ≤ 1.
    """
    if not (dimension >= 1 and 0 < epsilon <= 1 and 0 < delta < 1):
        raise InputError(
            f"dimension must be at least 1, epsilon in (0, 1] and delta in (0, 1), got {dimension}, {epsilon}, {delta}"
        )
    return math.ceil(3 * dimension / epsilon**2 * math.log(2 * dimension / delta))


def hessian_product(point: LossPoint, U: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """∇²L·U: the derivative of ½∇L = Fᵀq + E Y + Eᵀ Z + γX along U, factor by factor, doubled."""
    at, W, V, gamma = point.attention, point.loss.map.W, point.loss.V, point.loss.gamma
    dF = at.weights_jvp(U @ at.Y.mT + at.Z @ U.mT)
    dq = (dF @ point.X + at.F @ U) @ V @ V.mT
    slopes = point.q @ point.X.mT
    slopes = slopes - (at.F * slopes).sum(-1, keepdim=True)  # q_iᵀr_ik, so E = F∘slopes
    dE = dF * slopes + at.weights_jvp(dq @ point.X.mT + point.q @ U.mT)
    dE -= at.F * (dF * slopes).sum(-1, keepdim=True)
    product = dF.mT @ point.q + at.F.mT @ dq + dE @ at.Y + dE.mT @ at.Z
    return 2 * (product + point.E @ (U @ W.mT) + point.E.mT @ (U @ W) + gamma * U)
