"""Rows of a matrix that are equal, or nearly so: tokens whose embeddings no forward pass tells apart.

    near(i) = { j : ‖m_j − m_i‖ ≤ tolerance·‖m_i‖ }

Few pairs are measured in full. Projections never lengthen a difference, so for small tolerances a tree over a few of
them rules out all others, and behind few given rows the first columns of M alone do; for large tolerances, where
neither would, ‖m_j − m_i‖² = ‖m_j‖² − 2 m_j·m_i + ‖m_i‖² does.

Notation: M (v, d) the matrix, m_i its rows; R (d, k) orthonormal columns, P = M·R.
Limits: the relation is not transitive; groups overlap where the tolerance is near the distance between tokens.
Cost: v·k for each of few given rows, v·d·k flops for the projections, or v·d for each given row; then d for each pair
that is left, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.spatial import KDTree
from torch import Tensor

from unmask.errors import InputError

_NUM_PROJECTIONS = 8
_FEW, _NUM_COLUMNS = 64, 16  # given rows up to which columns are compared one by one, and how many of them
_MEMORY_BUDGET_BYTES = 2**28
_SMALL = 1e-2  # tolerances up to this leave few pairs to a tree of projections
_LIST_BYTES = 48  # of a number in a list, and again as an array
_ROUNDING = 1e-12  # of projections, norms and products in float64, generously


@torch.no_grad()
def near_rows(
    matrix: Float[Tensor, "v d"],
    rows: Sequence[int] | Int[Tensor, " k"],
    tolerance: float,
    memory_budget_bytes: int = _MEMORY_BUDGET_BYTES,
) -> dict[int, tuple[int, ...]]:
    """For each given row, all rows within the tolerance, itself included, in order.

    A tolerance of 0 finds rows that are equal to the last bit.
    """
    if matrix.ndim != 2:
        raise InputError(f"near rows are those of a matrix, got shape {tuple(matrix.shape)}")
    if not tolerance >= 0:
        raise InputError(f"tolerance must be 0 or more, got {tolerance}")
    chosen = torch.as_tensor(rows, dtype=torch.long, device=matrix.device).unique()
    if len(chosen) and not 0 <= int(chosen[0]) <= int(chosen[-1]) < len(matrix):
        raise InputError(f"rows must lie in 0…{len(matrix) - 1}, got {int(chosen[0])}…{int(chosen[-1])}")
    near: dict[int, list[int]] = {int(row): [] for row in chosen}
    if not near:
        return {}
    reach = tolerance * matrix[chosen].double().norm(dim=1).cpu()
    if tolerance > _SMALL:
        pairs = _pairs_by_products(matrix, chosen, reach, memory_budget_bytes)
    elif len(chosen) <= _FEW:
        pairs = _pairs_by_columns(matrix, chosen, reach, memory_budget_bytes)
    else:
        projections, norms = _project(matrix, memory_budget_bytes)
        slack = _ROUNDING * norms.max()
        pairs = _projected_pairs(projections, chosen.cpu(), reach + slack, memory_budget_bytes)
    for which, others in pairs:
        for part in _split(len(which), 32 * matrix.shape[1], memory_budget_bytes):
            ours, theirs = chosen[which[part].to(chosen)], others[part].to(chosen)
            distances = (matrix[theirs].double() - matrix[ours].double()).norm(dim=1)
            is_near = distances <= reach[which[part]].to(distances)
            for row, other in zip(ours[is_near].tolist(), theirs[is_near].tolist(), strict=True):
                near[row].append(other)
    return {row: tuple(sorted(found)) for row, found in near.items()}


def _project(
    matrix: Float[Tensor, "v d"], memory_budget_bytes: int
) -> tuple[Float[Tensor, "v k"], Float[Tensor, " v"]]:
    """Rows on a few random orthonormal directions, and their norms; both on the CPU."""
    d = matrix.shape[1]
    random = torch.randn(d, min(_NUM_PROJECTIONS, d), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions = torch.linalg.qr(random).Q
    projections = torch.empty(len(matrix), directions.shape[1], dtype=torch.float64)
    norms = torch.empty(len(matrix), dtype=torch.float64)
    for part in _split(len(matrix), 16 * d, memory_budget_bytes):
        block = matrix[part].double()
        projections[part], norms[part] = (block @ directions.to(block)).cpu(), block.norm(dim=1).cpu()
    return projections, norms


def _pairs_by_columns(
    matrix: Float[Tensor, "v d"], chosen: Int[Tensor, " c"], reach: Float[Tensor, " c"], memory_budget_bytes: int
) -> Iterator[tuple[Int[Tensor, " p"], Int[Tensor, " p"]]]:
    """Pairs (place in `chosen`, row) whose first columns differ by `reach` at the most."""
    own, limit = matrix[chosen, :_NUM_COLUMNS].double(), (reach * (1 + _ROUNDING)).to(matrix.device)[:, None]
    for part in _split(len(matrix), 8 * (_NUM_COLUMNS + 2 * len(chosen)), memory_budget_bytes):
        others = matrix[part, :_NUM_COLUMNS].double()
        distances = torch.cdist(own, others, compute_mode="donot_use_mm_for_euclid_dist")
        which, where = (distances <= limit).nonzero().cpu().T
        yield which, where + part.start


def _projected_pairs(
    projections: Float[Tensor, "v k"], chosen: Int[Tensor, " c"], reach: Float[Tensor, " c"], memory_budget_bytes: int
) -> Iterator[tuple[Int[Tensor, " p"], Int[Tensor, " p"]]]:
    """Pairs (place in `chosen`, row) whose projections differ by `reach` at the most, in parts that memory allows."""
    tree = KDTree(projections.numpy())
    for part in _split(len(chosen), _LIST_BYTES * len(projections), memory_budget_bytes):
        found = tree.query_ball_point(projections[chosen[part]].numpy(), reach[part].numpy())
        counts = torch.tensor([len(rows) for rows in found])
        which = torch.arange(part.start, part.start + len(found)).repeat_interleave(counts)
        yield which, torch.from_numpy(np.concatenate([np.asarray(rows, dtype=np.int64) for rows in found]))


def _pairs_by_products(
    matrix: Float[Tensor, "v d"], chosen: Int[Tensor, " c"], reach: Float[Tensor, " c"], memory_budget_bytes: int
) -> Iterator[tuple[Int[Tensor, " p"], Int[Tensor, " p"]]]:
    """The same by inner products in the matrix's own digits; pairs that their rounding leaves open are among them."""
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    own, limit = matrix[chosen].to(dtype), reach.square().to(matrix.device, dtype)[:, None]
    squares, slack = own.square().sum(1, keepdim=True), 2 * matrix.shape[1] * torch.finfo(dtype).eps
    for part in _split(len(matrix), 16 * (matrix.shape[1] + 3 * len(chosen)), memory_budget_bytes):
        block = matrix[part].to(dtype)
        sums = squares + block.square().sum(1)
        is_far = sums - 2 * (own @ block.T) > limit + slack * sums  # false where numbers overflow
        which, others = (~is_far).nonzero().cpu().T
        yield which, others + part.start


def _split(count: int, bytes_each: int, memory_budget_bytes: int) -> Iterator[slice]:
    """Slices of a range that memory allows."""
    size = max(1, memory_budget_bytes // max(1, bytes_each))
    return (slice(start, start + size) for start in range(0, count, size))
