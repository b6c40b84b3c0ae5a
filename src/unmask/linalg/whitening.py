"""Gradients of one input, side by side, scaled so that their noise is white: M = D·[G₁, G₂, …]·C = D·Xᵀ·Δ + E.

Where the variance of every entry's error is known (rounding, a grid), D and C make the mean variance of each row and
column one; where it is not, each gradient is divided by its own σ. Scaling columns leaves the column space alone;
scaling rows turns an input x into D∘x, which is what must then be tested.

Notation: X (n, d) the inputs; G (d, m) a gradient, m columns in all; E noise of variance 1.
Limits: variances that are no product of a row's and a column's share are white on average only.
Source: Sinkhorn's iteration; Leeb, Romanov, arXiv 2009.12546 (matrices with such noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.noise import estimate_noise
from unmask.shapes import Basis

_BALANCING_STEPS = 12


@dataclass(frozen=True)
class WhitenedGradients:
    """M, the scale D of its rows, and the noise of each gradient in that gradient's own units.

    `excess` is the noise that M showed beyond what was taken for it, as a factor; far above one, something else than
    the given variances is at work.
    """

    matrix: Float[Tensor, "d m"]
    row_scale: Float[Tensor, " d"]
    sigmas: tuple[float, ...]
    widths: tuple[int, ...]
    excess: float

    def louder(self, factor: float) -> WhitenedGradients:
        """The same with the noise taken to be this many times larger."""
        return replace(self, matrix=self.matrix / factor, sigmas=tuple(factor * sigma for sigma in self.sigmas))


def whiten(
    gradients: Sequence[Float[Tensor, "d m"]], variances: Sequence[Float[Tensor, "d m"] | None] | None = None
) -> WhitenedGradients:
    """With the variance of every entry where it is given; else with one σ for a gradient, from its own spectrum.

    Noise beyond that shows in the spectrum of M and is divided out as well; where M shows less, the variances are kept
    as bounds. A gradient with no more columns than inputs has no direction without signal: its σ comes out too large
    and it counts for less, until `rescale` knows better.
    """
    doubles = [gradient.double() for gradient in gradients]
    given = [None] * len(doubles) if variances is None else variances
    filled = [_constant(g) if v is None else v.double() for g, v in zip(doubles, given, strict=True)]
    rows, columns = balance(torch.cat(filled, dim=1))
    matrix = rows[:, None] * torch.cat(doubles, dim=1) * columns
    excess = max(1.0, estimate_noise(matrix).sigma)
    sigmas = tuple(excess * float(variance.mean().sqrt()) for variance in filled)
    return WhitenedGradients(matrix / excess, rows, sigmas, tuple(g.shape[1] for g in doubles), excess)


def _constant(gradient: Float[Tensor, "d m"]) -> Float[Tensor, "d m"]:
    """σ² by the spectrum in every entry; never below the rounding of float32."""
    rounding = float(gradient.abs().max()) * torch.finfo(torch.float32).eps
    return torch.full_like(gradient, max(estimate_noise(gradient).sigma, rounding) ** 2)


def rescale(whitened: WhitenedGradients, basis: Basis) -> WhitenedGradients:
    """With σ of each gradient from what it has outside of `basis`, orthonormal and thought to hold all of the signal.

    σ is never raised: what is not explained yet is no noise.
    """
    parts = whitened.matrix.split(whitened.widths, dim=1)
    outside = (part - basis @ (basis.T @ part) for part in parts)
    free = len(basis) - basis.shape[1]
    shrink = [min(1.0, float((rest.square().sum() / (free * rest.shape[1])).sqrt())) for rest in outside]
    matrix = torch.cat([part / factor for part, factor in zip(parts, shrink, strict=True)], dim=1)
    sigmas = tuple(sigma * factor for sigma, factor in zip(whitened.sigmas, shrink, strict=True))
    return replace(whitened, matrix=matrix, sigmas=sigmas)


def balance(variance: Float[Tensor, "d m"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " m"]]:
    """D and C such that D²·V·C² has a mean of one in each row and column; rows and columns of zeros get zero."""
    rows, columns = torch.ones_like(variance[:, 0]), torch.ones_like(variance[0])
    for _ in range(_BALANCING_STEPS):
        columns = _inverse_roots((rows.square() @ variance) / len(rows))
        rows = _inverse_roots((variance @ columns.square()) / len(columns))
    return rows, columns


def _inverse_roots(means: Tensor) -> Tensor:
    return torch.where(means > 0, means.clamp_min(1e-300).rsqrt(), torch.zeros_like(means))
