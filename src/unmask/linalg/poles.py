"""Poles of a function from its values at points: rational approximation in barycentric form (AAA).

    r(z) = Σ_j w_j f_j/(z − z_j) / Σ_j w_j/(z − z_j)

Support points z_j are added where r is off most; w is the right singular vector of the Loewner matrix
(f_i − f_j)/(z_i − z_j) with the least singular value. The poles of r are the zeros of its denominator, the finite
eigenvalues of an arrow-shaped pencil.

Notation: z the points, f the values, both complex; r interpolates at z_j and is least squares elsewhere.
Limits: below the tolerance r fits noise, and such poles are spurious.
Cost: an SVD of (n, m) for every m up to the degree.
Source: Nakatsukasa, Sète, Trefethen, SIAM J. Sci. Comput. 40, 2018.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Complex, Float
from scipy.linalg import eigvals


def rational_poles(
    z: Complex[np.ndarray, " n"], f: Float[np.ndarray, " n"], tolerance: float, max_degree: int
) -> Complex[np.ndarray, " m"]:
    """Poles of the first approximation that is off by at most `tolerance` anywhere, or of the last one allowed."""
    is_left, support = np.ones(len(z), dtype=bool), list[int]()
    error, weight = np.abs(f - f.mean()), np.ones(0, dtype=complex)
    while len(support) < max_degree and error[is_left].max() > tolerance:
        support.append(int(np.argmax(np.where(is_left, error, -1.0))))
        is_left[support[-1]] = False
        cauchy = 1 / (z[is_left][:, None] - z[support])
        loewner = (f[is_left][:, None] - f[support]) * cauchy
        weight = np.linalg.svd(loewner, full_matrices=False)[2][-1].conj()
        bottom = cauchy @ weight
        bottom = np.where(np.abs(bottom) < 1e-300, 1e-300, bottom)
        error[is_left] = np.abs(f[is_left] - (cauchy @ (weight * f[support])) / bottom)
    if not support:
        return np.zeros(0, dtype=complex)
    size = len(support)
    pencil, mask = np.zeros((size + 1, size + 1), dtype=complex), np.eye(size + 1)
    pencil[0, 1:], pencil[1:, 0], mask[0, 0] = weight, 1, 0
    pencil[1:, 1:] = np.diag(z[support])
    poles = eigvals(pencil, mask)
    return poles[np.isfinite(poles)]
