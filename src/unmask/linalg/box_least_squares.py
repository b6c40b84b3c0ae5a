"""Least squares in a box, where most unknowns end at a bound."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Vector = Float[Tensor, " n"]


def box_least_squares(
    matrix: Float[Tensor, "m n"],
    values: Float[Tensor, " m"],
    start: Vector,
    lower: Vector,
    upper: Vector,
    *,
    damping: float = 1e-6,
    penalty: float = 0.03,
    num_iterations: int = 120,
) -> Vector:
    """argmin ‖Aw − y‖² + damping·‖w − start‖² over lower ≤ w ≤ upper, by ADMM.

    The box is split off: a ridge problem in w, a clip in z, and the running difference u between them. The ridge
    problem has the same matrix in every iteration, so one inverse serves them all: of AAᵀ + ridge (m, m) by Woodbury if
    there are fewer equations than unknowns, else of AᵀA + ridge (n, n).
    Limits: a fixed number of iterations, so the result is near the optimum, not at it; columns should be near norm 1.
    Cost: m·n·min(m, n) once, then 4·m·n an iteration, or n² if m > n.
    Source: Boyd et al., Distributed Optimization and Statistical Learning via ADMM, section 5.2.
    """
    ridge = damping + penalty
    is_wide = matrix.shape[0] <= matrix.shape[1]
    gram = matrix @ matrix.T if is_wide else matrix.T @ matrix
    gram.diagonal().add_(ridge)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    constant = matrix.T @ values + damping * start
    inside = start.clamp(lower, upper)
    difference = torch.zeros_like(inside)
    for _ in range(num_iterations):
        wanted = constant + penalty * (inside - difference)
        free = (wanted - matrix.T @ (inverse @ (matrix @ wanted))) / ridge if is_wide else inverse @ wanted
        inside = (free + difference).clamp(lower, upper)
        difference += free - inside
    return inside


def project_to_simplex(columns: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    """Every column moved to the nearest point with entries ≥ 0 and sum 1.

    Source: Duchi et al., Efficient Projections onto the ℓ1-Ball, ICML 2008, figure 1.
    """
    descending = columns.sort(0, descending=True).values
    excess = descending.cumsum(0) - 1
    counts = torch.arange(1, len(columns) + 1, dtype=columns.dtype, device=columns.device)[:, None]
    last = (descending > excess / counts).sum(0) - 1
    shift = excess.gather(0, last[None]) / (last + 1)
    return (columns - shift).clamp_min(0)
