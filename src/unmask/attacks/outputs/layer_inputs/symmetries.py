"""Symmetries that leave the output of an attention layer and the norms of its tokens as they are.

    X' = P X S,  P a permutation, S orthogonal, S W Sᵀ = W   ⇒   F(X') = P F(X) Pᵀ,  F(X')·X' = P Y S,  ‖x'_i‖ = ‖x_Pi‖

So X' is another pre-image wherever P Y S = Y and P keeps the norms, and neither the output nor the norms tell the two
apart. The same holds where S W Sᵀ − W only adds a constant to each row of the scores.

Theorem: X' = X for all of them if (1) rank Y is n or d, and (2) rows of Y that some P may exchange belong to equal
tokens. By (2) P X = X and P Y = Y, so Y S = Y. If rank Y = d then S = I; if rank Y = n then F is invertible, and
X S = F⁻¹ Y S = F⁻¹ Y = X.

(1) is judged beyond the error of Y. For (2), P leaves Y Yᵀ, Y W Yᵀ (up to constants of rows) and the norms as they are,
so it exchanges only rows whose entries there are the same numbers in some order. With a causal mask no P but I is left,
and F is invertible.

`images` are starts for symmetries that hold nearly: X mirrored, with two tokens exchanged, or with the other sign.

Notation: as in `problem.py`.
Limits: pre-images that no symmetry relates are for a search to find.
Cost: n²d + n² log n, and one SVD of Y.
Source: ours.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem, Posed

_ALIKE = 1e-6  # relative difference of numbers that a symmetry would make equal
_ERRORS = 8.0  # errors of Y that such a difference may have, as it is of products
_MIRRORS = 6
_EXCHANGES = 8


def may_have_image(posed: Posed, X: Float[Tensor, "n d"]) -> bool:
    """Whether a symmetry may give another pre-image with the same norms: what the theorem does not exclude."""
    if posed.causal:
        return False
    if not posed.has_full_rank:
        return True
    alike = rows_alike(posed.W, posed.Y, posed.norms, posed.mixed_error)
    apart = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist") > _ALIKE * X.norm(dim=1).max()
    return bool((alike & apart).any())


def rows_alike(
    W: Float[Tensor, "d d"], Y: Float[Tensor, "n d"], norms: Float[Tensor, " n"] | None, error: float
) -> Bool[Tensor, "n n"]:
    """Pairs of rows that have the same numbers in all that a permutation must keep.

    Without norms S need not be orthogonal, and the scores alone are kept.
    """
    size = float(Y.norm(dim=1).max().clamp(min=1e-300))
    scores = Y @ W @ Y.mT
    scores = scores - scores.mean(dim=1, keepdim=True)
    kept = []
    for products in (scores, scores.mT) if norms is None else (Y @ Y.mT, scores, scores.mT):
        numbers = torch.cat([products.sort(dim=1).values, products.diagonal()[:, None]], dim=1)
        kept.append(numbers / products.abs().max().clamp(min=1e-300))
    if norms is not None:
        kept.append((norms / norms.max())[:, None])
    tolerance = _ALIKE + _ERRORS * error / size
    return torch.cdist(torch.cat(kept, dim=1), torch.cat(kept, dim=1), p=float("inf")) <= tolerance


def images(problem: AttentionProblem, x: Float[Tensor, " m"]) -> Float[Tensor, "k m"]:
    """A root with the other sign, mirrored along directions in which Y is short, with tokens of near rows exchanged."""
    Y, Z = problem.Y, x.reshape(problem.Y.shape)
    starts = [-Z]
    for direction in torch.linalg.svd(Y).Vh.flip(0)[:_MIRRORS]:
        starts.append(Z - 2 * torch.outer(Z @ direction, direction))
    first, second = torch.triu_indices(len(Y), len(Y), 1)
    for pair in (Y[first] - Y[second]).norm(dim=1).argsort()[:_EXCHANGES]:
        order = list(range(len(Y)))
        order[first[pair]], order[second[pair]] = order[second[pair]], order[first[pair]]
        starts.append(Z[order])
    return torch.stack(starts).flatten(1)
