"""The matrix of least nuclear norm among those that agree with rank-one measurements."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_RIDGE = 1e-13  # of the mean diagonal: Gram matrices of n ≤ d² random measurements are definite but for rounding
_SHRINKAGE = 0.1  # of the first guess's norm; Douglas-Rachford converges for any, fastest for about this


def least_nuclear_norm(
    X: Float[Tensor, "n d"],
    Y: Float[Tensor, "n d"],
    b: Float[Tensor, " n"],
    max_steps: int = 3000,
    tolerance: float = 1e-11,
) -> tuple[Float[Tensor, "d d"], int]:
    """min ‖Z‖_* subject to x_kᵀ Z y_k = b_k, by Douglas-Rachford splitting; the matrix, and the steps taken.

        P = proj(Z),   Q = shrink_γ(2P − Z),   Z ← Z + Q − P,   until ‖Q − P‖ ≤ tolerance·‖P‖

    Notation: proj the nearest matrix that meets the measurements, Z + Aᵀ(AAᵀ)⁻¹(b − AZ), with
    (AAᵀ)_kl = (x_kᵀx_l)(y_kᵀy_l); shrink_γ lowers singular values by γ, to 0 at the least.
    Limits: a matrix of rank r is the minimiser with high probability from about 2.5 times its r(2d − r) degrees of
    freedom on; below, something else of smaller norm is. Measurements must be independent, so n ≤ d².
    Cost: a Cholesky factor of (n, n) once; a step is an SVD of (d, d) and two triangular solves.
    Source: Recht, Fazel, Parrilo 2010 (nuclear norm); Combettes and Pesquet 2007 (Douglas-Rachford).
    """
    gram = (X @ X.T) * (Y @ Y.T)
    gram = gram + _RIDGE * gram.diagonal().mean() * torch.eye(len(b)).to(gram)
    factor = torch.linalg.cholesky(gram)

    def projected(Z: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
        off = b - torch.einsum("kd,kd->k", X @ Z, Y)
        weights = torch.cholesky_solve(off[:, None], factor)
        return Z + (X * weights).T @ Y

    Z = projected(X.new_zeros(X.shape[1], X.shape[1]))
    shrinkage = _SHRINKAGE * torch.linalg.matrix_norm(Z, 2)
    P = Z
    for step in range(max_steps):
        P = projected(Z)
        left, values, right = torch.linalg.svd(2 * P - Z, full_matrices=False)
        Q = (left * (values - shrinkage).clamp_min(0)) @ right
        Z = Z + Q - P
        if torch.linalg.matrix_norm(Q - P) <= tolerance * torch.linalg.matrix_norm(P):
            return P, step + 1
    return P, max_steps
