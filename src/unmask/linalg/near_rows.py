"""Rows of a matrix that are equal, or nearly so: tokens whose embeddings no forward pass tells apart.

    near(i) = { j : ‖m_j − m_i‖ ≤ tolerance·‖m_i‖ }

Projections never lengthen a difference, so a few of them rule out almost all pairs: the first gives a window of sorted
rows, all together leave next to nothing but the answer, and only that is measured in full.

Notation: M (v, d) the matrix, m_i its rows; R (d, k) orthonormal columns, P = M·R.
Limits: the relation is not transitive; groups overlap where the tolerance is near the distance between tokens.
Cost: v·d·k flops for the projections, then d for each pair that they leave; float64 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.errors import InputError

_NUM_PROJECTIONS = 8
_MEMORY_BUDGET_BYTES = 2**28
_ROUNDING = 64 * torch.finfo(torch.float64).eps  # of a projection or a norm, by the norm of its row


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
    projections, norms = _project(matrix, memory_budget_bytes)
    reach = tolerance * norms[chosen]
    slack = _ROUNDING * norms.max() if len(norms) else 0.0
    for which, others in _window_pairs(projections[:, 0], chosen, reach + slack, memory_budget_bytes):
        short = (projections[others] - projections[chosen[which]]).norm(dim=1) <= reach[which] + slack
        which, others = which[short], others[short]
        for part in _split(len(which), 32 * matrix.shape[1], memory_budget_bytes):
            distances = (matrix[others[part]].double() - matrix[chosen[which[part]]].double()).norm(dim=1)
            is_near = distances <= reach[which[part]]
            for row, other in zip(chosen[which[part]][is_near].tolist(), others[part][is_near].tolist(), strict=True):
                near[row].append(other)
    return {row: tuple(sorted(found)) for row, found in near.items()}


def _project(
    matrix: Float[Tensor, "v d"], memory_budget_bytes: int
) -> tuple[Float[Tensor, "v k"], Float[Tensor, " v"]]:
    """Rows on a few random orthonormal directions, and their norms."""
    d = matrix.shape[1]
    random = torch.randn(d, min(_NUM_PROJECTIONS, d), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions = torch.linalg.qr(random).Q.to(matrix.device)
    projections = torch.empty(len(matrix), directions.shape[1], dtype=torch.float64, device=matrix.device)
    norms = torch.empty(len(matrix), dtype=torch.float64, device=matrix.device)
    for part in _split(len(matrix), 16 * d, memory_budget_bytes):
        block = matrix[part].double()
        projections[part], norms[part] = block @ directions, block.norm(dim=1)
    return projections, norms


def _window_pairs(
    keys: Float[Tensor, " v"], chosen: Int[Tensor, " k"], reach: Float[Tensor, " k"], memory_budget_bytes: int
) -> Iterator[tuple[Int[Tensor, " p"], Int[Tensor, " p"]]]:
    """Pairs (place in `chosen`, row) whose keys differ by `reach` at the most, in parts that memory allows."""
    ordered, order = keys.sort()
    starts = torch.searchsorted(ordered, keys[chosen] - reach)
    counts = torch.searchsorted(ordered, keys[chosen] + reach, right=True) - starts
    bytes_a_pair = 8 * (4 * _NUM_PROJECTIONS + 6)
    ends = (counts * bytes_a_pair).cumsum(0).cpu()
    first = 0
    while first < len(chosen):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(ends, before + memory_budget_bytes, right=True)))
        some = counts[first:last]
        which = torch.repeat_interleave(torch.arange(first, last, device=keys.device), some)
        within = torch.arange(len(which), device=keys.device) - (some.cumsum(0) - some).repeat_interleave(some)
        yield which, order[starts[which] + within]
        first = last


def _split(count: int, bytes_each: int, memory_budget_bytes: int) -> Iterator[slice]:
    """Slices of a range that memory allows."""
    size = max(1, memory_budget_bytes // max(1, bytes_each))
    return (slice(start, start + size) for start in range(0, count, size))
