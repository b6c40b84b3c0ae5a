"""Codes of a product quantiser: a vector in m parts, each replaced by the number of its nearest centroid.

    code_p(x) = argmin_c ‖x_p − C[p, c]‖,   p = 1 … m

Signs are such codes, with m = k parts and the two centroids −1 and 1 (`sign_centroids`).
A vector and its decoded code have the same code, so that a stored (decoded) vector tells its code.

Notation: C the centroids, (m, codes, k/m); x_p the p-th part of x.
Limits: a part that lies between two centroids may go to either, as rounding wills; `has_code` lets both pass.
Cost: k·codes multiplications a vector.
Source: Jégou, Douze, Schmid, IEEE PAMI 33 (2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Centroids = Float[Tensor, "m codes k_m"]
_DISTANCES = 2**23  # held at once, in float64
_TIE = 1e-4  # of a distance squared: rounding in float32 moves these by about 1e-6


def product_codes(vectors: Float[Tensor, "n k"], centroids: Centroids) -> Int[Tensor, "n m"]:
    """The number of the nearest centroid of each part."""
    return torch.cat([_distances(some, centroids).argmin(2) for some in _split(vectors, centroids)])


def decode_codes(codes: Int[Tensor, "n m"], centroids: Centroids) -> Float[Tensor, "n k"]:
    """The vectors that codes stand for."""
    parts = torch.arange(centroids.shape[0], device=codes.device)
    return centroids[parts, codes].flatten(1)


def sign_centroids(width: int) -> Centroids:
    """The centroids of which the nearest is a number's sign, at the length of a vector of length 1."""
    return torch.tensor([-1.0, 1.0]).div(width**0.5).expand(width, 2)[..., None].contiguous()


def has_code(vectors: Float[Tensor, "n k"], code: Int[Tensor, "1 m"], centroids: Centroids) -> Bool[Tensor, " n"]:
    """Whether a code's centroids are the nearest ones of every part of a vector, or as near as the nearest."""
    return differing_parts(vectors, code, centroids) == 0


def differing_parts(
    vectors: Float[Tensor, "n k"], code: Int[Tensor, "1 m"], centroids: Centroids
) -> Float[Tensor, " n"]:
    """The share of a vector's parts that are nearer to another centroid than to the code's."""
    return torch.cat([_differing_parts(some, code, centroids) for some in _split(vectors, centroids)])


def _differing_parts(
    vectors: Float[Tensor, "n k"], code: Int[Tensor, "1 m"], centroids: Centroids
) -> Float[Tensor, " n"]:
    distances = _distances(vectors, centroids)
    own = distances.gather(2, code.expand(len(vectors), -1)[..., None])[..., 0]
    least = distances.min(2).values
    return (own > least + _TIE * least.clamp_min(torch.finfo(least.dtype).eps)).double().mean(1)


def _split(vectors: Float[Tensor, "n k"], centroids: Centroids) -> Sequence[Tensor]:
    """Vectors in parts whose distances fit in memory."""
    return vectors.split(max(1, _DISTANCES // (centroids.shape[0] * centroids.shape[1])))


def _distances(vectors: Float[Tensor, "n k"], centroids: Centroids) -> Float[Tensor, "n m codes"]:
    """Squared distances of parts and centroids, in float64."""
    parts = vectors.double().unflatten(1, (centroids.shape[0], -1)).transpose(0, 1)
    return torch.cdist(parts, centroids.double()).transpose(0, 1).square()
