"""Recovered weights against the true ones, modulo what no query can tell apart (the gauge)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from unmask.errors import InputError
from unmask.linalg.heads import EQUAL_TOLERANCE, HeadWeights, canonical_heads
from unmask.scores.inputs import paired_matrices, relative_error
from unmask.shapes import Rows


@dataclass(frozen=True)
class WeightScore:
    """Errors of the canonical heads; a missing head counts as recovered as 0, so its errors are 1."""

    W_error: float  # all heads together
    v_error: float
    worst_W_error: float  # noqa: N815 (W is the paper's letter); the worst head alone
    worst_v_error: float
    num_true: int  # canonical heads
    num_missing: int  # true heads without a partner
    num_extra: int  # recovered heads without a partner


def score_heads(recovered: HeadWeights, true: HeadWeights, tolerance: float = EQUAL_TOLERANCE) -> WeightScore:
    """Compare two lists of heads modulo their order, the splitting of a head, and heads that do nothing.

        W_error = (Σ_h ‖Ŵ_π(h) − W_h‖² / Σ_h ‖W_h‖²)^½,   worst_W_error = max_h ‖Ŵ_π(h) − W_h‖ / ‖W_h‖

    and v alike. Notation: W_h, v_h the canonical true heads; Ŵ, v̂ the canonical recovered ones; π the
    one-to-one assignment with the least sum of relative errors of W, since its W names a canonical head.
    Limits: heads are partners only if ‖Ŵ − W‖ < ‖W‖, that is, if Ŵ is a better guess than 0; otherwise one is
    missing and one extra. So a true W = 0 has a partner only if it was recovered as exactly 0. A recovered
    head that is not finite is extra.
    Source: as for `canonical_heads`.
    """
    if len(recovered) and recovered.v.shape[1:] != true.v.shape[1:]:
        raise InputError(
            f"recovered must have the width of true, {tuple(true.v.shape[1:])}, got {tuple(recovered.v.shape[1:])}."
        )
    if not (true.W.isfinite().all() and true.v.isfinite().all()):
        raise InputError("true holds values that are not finite; a secret must be finite to compare with.")
    is_finite = recovered.W.isfinite().all(dim=(1, 2)) & recovered.v.flatten(1).isfinite().all(dim=1)
    found = canonical_heads(recovered.select(is_finite).cpu(), tolerance)
    heads = canonical_heads(true.cpu(), tolerance)

    error = np.array([[relative_error(W_hat, W) for W_hat in found.W] for W in heads.W])
    error = error.reshape(len(heads), len(found))
    # An error of 1 is the price of no partner; capping there leaves the assignment free to give a head none.
    pairs = [(i, j) for i, j in zip(*linear_sum_assignment(error.clip(max=1)), strict=True) if error[i, j] < 1]
    matched = HeadWeights(W=torch.zeros_like(heads.W), v=torch.zeros_like(heads.v))
    for i, j in pairs:
        matched.W[i], matched.v[i] = found.W[j], found.v[j]
    return WeightScore(
        W_error=relative_error(matched.W, heads.W),
        v_error=relative_error(matched.v, heads.v),
        worst_W_error=max(map(relative_error, matched.W, heads.W), default=0.0),
        worst_v_error=max(map(relative_error, matched.v, heads.v), default=0.0),
        num_true=len(heads),
        num_missing=len(heads) - len(pairs),
        num_extra=len(found) - len(pairs) + int((~is_finite).sum()),
    )


def score_up_to_linear_map(recovered: Rows, true: Rows) -> float:
    """The relative residual of the best linear map from the recovered matrix to the true one.

        min_A ‖R·A − T‖_F / ‖T‖_F

    Notation: T the true matrix (m, d), R the recovered one (m, d), A any (d, d). For the output layer of a
    language model m is the vocabulary. 0 says that the columns of R span those of T, 1 that none overlaps.
    Limits: needs m > d, since any R of full rank fits when m ≤ d; a random R scores about (1 − d/m)^½, not 1.
    A recovery that is not finite scores infinity.
    Source: Carlini et al., 'Stealing part of a production language model', arXiv 2403.06634 (the gauge).
    """
    recovered, true = paired_matrices(recovered, true)
    num_rows, width = true.shape
    if num_rows <= width:
        raise InputError(
            f"true must have more rows than columns, got {num_rows} by {width}; a linear map fits anything."
        )
    if not recovered.isfinite().all():
        return float("inf")
    # gelsd works by SVD: the recovered matrix may lack full rank.
    best_map = torch.linalg.lstsq(recovered, true, driver="gelsd").solution
    return relative_error(recovered @ best_map, true)
