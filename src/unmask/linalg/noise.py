"""How noisy a matrix is whose signal has a low rank, and where its spectrum stops being noise.

A d × m matrix of independent entries of standard deviation σ has singular values of a known shape (Marchenko and
Pastur): they fill the interval σ·(√m − √d) … σ·(√m + √d). A signal of rank r lifts r of them out of it. So the median
of those that are left tells σ, and what lies above the edge is signal.

Notation: d ≤ m the sides of the matrix; s its singular values; r the rank of the signal; β = (d − r)/(m − r).
Limits: r well below d. Directions of the signal below the edge stay in the bulk and make σ too large, never too small.
Source: Gavish, Donoho, arXiv 1305.5870 (median); Johnstone, Annals of Statistics 29 (2001) (the edge's margin).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError

# 99.9 % quantile of Tracy and Widom's law for real matrices: the largest of d noise values stays below.
_TRACY_WIDOM = 3.2724
_MAX_ROUNDS = 50
_GRID = 4000  # points of the integral of the density
_LEAST_BULK = 8  # singular values that a median is taken of


@dataclass(frozen=True)
class NoiseLevel:
    """σ, and the rank of the signal: the number of singular values that noise does not reach."""

    sigma: float
    rank: int


def noise_edge(d: int, m: int, sigma: float = 1.0) -> float:
    """The singular value that pure noise exceeds with a probability of one in a thousand.

    σ·√(μ + 3.27·τ) with μ = (√(m−1) + √d)² and τ = (√(m−1) + √d)·(1/√(m−1) + 1/√d)^⅓.
    """
    total = math.sqrt(max(m - 1, 1)) + math.sqrt(d)
    scale = total * (1 / math.sqrt(max(m - 1, 1)) + 1 / math.sqrt(d)) ** (1 / 3)
    return sigma * math.sqrt(total**2 + _TRACY_WIDOM * scale)


def marchenko_pastur_median(d: int, m: int) -> float:
    """The median singular value of d × m standard normal noise, d ≤ m, for large sides.

    s²/m has the density √((b − x)(x − a)) / (2πβx) on [a, b] = [(1 − √β)², (1 + √β)²]. With x = y² the integrand stays
    bounded at β = 1 too.
    """
    if not 1 <= d <= m:
        raise InputError(f"the sides of a noise matrix must be 1 ≤ d ≤ m, got {d} and {m}")
    low, high = 1 - math.sqrt(d / m), 1 + math.sqrt(d / m)
    edges = np.linspace(low, high, _GRID + 1)
    y = (edges[1:] + edges[:-1]) / 2
    density = np.sqrt(np.maximum((high**2 - y**2) * (y**2 - low**2), 0)) / y
    cumulated = np.concatenate([[0.0], np.cumsum(density)])
    return float(math.sqrt(m) * np.interp(0.5, cumulated / cumulated[-1], edges))


def estimate_noise(matrix: Float[Tensor, "d m"]) -> NoiseLevel:
    """The noise of a matrix, from its own spectrum. Cost: its singular values."""
    if matrix.ndim != 2 or min(matrix.shape) < 2:
        raise InputError(f"noise is estimated from a matrix of two rows and columns at least, got {matrix.shape}")
    return noise_in(torch.linalg.svdvals(square(matrix.double())), max(matrix.shape))


def square(matrix: Float[Tensor, "d m"]) -> Float[Tensor, "d k"]:
    """A matrix with the singular values and left singular vectors of a wide one, and no more columns than rows."""
    d, m = matrix.shape
    return matrix if d >= m else torch.linalg.qr(matrix.T, mode="r").R.T


def noise_in(values: Float[Tensor, " d"], m: int) -> NoiseLevel:
    """The same from the singular values of a matrix whose longer side is m.

    The iteration starts from r = 0, where σ is largest, and only ever raises r: signals leave the bulk one by one.
    """
    d = len(values)
    rank, sigma = 0, 0.0
    for _ in range(_MAX_ROUNDS):
        sigma = float(values[rank:].median()) / marchenko_pastur_median(d - rank, m - rank)
        found = int((values > noise_edge(d, m, sigma)).sum())
        if found <= rank or d - found < _LEAST_BULK:
            break
        rank = found
    return NoiseLevel(sigma, rank)
