"""A recovered input matrix against the true one, rows being tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from unmask.errors import InputError
from unmask.shapes import Rows


@dataclass(frozen=True)
class InputScore:
    """How far a recovered input matrix is from the true one."""

    relative_error: float  # Frobenius norm of the difference by that of the true matrix
    worst_row_error: float  # the same for the worst row alone
    assignment: tuple[int, ...]  # for each true row the index of its recovered row


def score_inputs(recovered: Rows, true: Rows, row_order: Literal["fixed", "any"] = "fixed") -> InputScore:
    """Compare two input matrices, row by row or up to the order of the rows.

        relative_error = min_π ‖X̂_π − X‖_F / ‖X‖_F,   worst_row_error = max_i ‖x̂_π(i) − x_i‖ / ‖x_i‖

    Notation: X the true rows (n, d); X̂ the recovered ones; π the identity for 'fixed', any permutation for
    'any'. Attention without mask and positions maps permuted rows to permuted rows, so an output whose rows
    come in no order determines X only up to order: score it with 'any'.
    Limits: π minimises the Frobenius error, not the worst row. A true row that is 0 has error 0 if it was
    recovered as 0, else infinity. A recovery that is not finite has an infinite error.
    Cost: n·d, and n²·d + n³ for 'any'. Everything in float64.
    Source: definition; the permutation by scipy.optimize.linear_sum_assignment.
    """
    if row_order not in ("fixed", "any"):
        raise InputError(f"row_order must be 'fixed' or 'any', got {row_order!r}.")
    recovered, true = paired_matrices(recovered, true)
    assignment = list(range(len(true)))
    if row_order == "any" and recovered.isfinite().all():
        # The other modes of cdist expand the square and lose half of the digits.
        distance = torch.cdist(true, recovered, compute_mode="donot_use_mm_for_euclid_dist")
        assignment = linear_sum_assignment(distance.square().numpy())[1].tolist()
    matched = recovered[assignment]
    return InputScore(
        relative_error=relative_error(matched, true),
        worst_row_error=max(relative_error(row, true_row) for row, true_row in zip(matched, true, strict=True)),
        assignment=tuple(assignment),
    )


def relative_error(recovered: Tensor, true: Tensor) -> float:
    """‖recovered − true‖ / ‖true‖ over all entries; against 0 it is 0 or infinity, and never NaN."""
    error = float(torch.linalg.vector_norm(recovered - true))
    if error == 0:
        return 0.0
    norm = float(torch.linalg.vector_norm(true))
    return error / norm if norm > 0 and math.isfinite(error) else math.inf


def to_float64(values: Tensor) -> Tensor:
    """The same values in float64 on the CPU, without their graph."""
    return torch.as_tensor(values).detach().to(device="cpu", dtype=torch.float64)


def paired_matrices(recovered: Rows, true: Rows) -> tuple[Rows, Rows]:
    """Both matrices in float64, checked to be of one shape, not empty, and the true one finite."""
    recovered, true = to_float64(recovered), to_float64(true)
    if true.ndim != 2 or true.numel() == 0:
        raise InputError(f"true must be a matrix with at least one entry, got shape {tuple(true.shape)}.")
    if recovered.shape != true.shape:
        raise InputError(f"recovered must have the shape of true, {tuple(true.shape)}, got {tuple(recovered.shape)}.")
    if not true.isfinite().all():
        raise InputError("true holds values that are not finite; a secret must be finite to compare with.")
    return recovered, true
