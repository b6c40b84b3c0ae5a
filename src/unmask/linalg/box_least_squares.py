"""Least squares in a box, where most unknowns end at a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.linalg.lapack import dposv
from torch import Tensor

Vector = Float[Tensor, " n"]
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_MOST_AT_FIRST = 256  # unknowns off their lower bound that are kept from the start
_AT_FIRST = 192  # unknowns that are free at first where there are more
_AT_ONCE = 128  # unknowns that are added in a round
_MAX_ROUNDS = 12
_MAX_NEWTON_STEPS = 200
_MAX_HALVINGS = 12
_LEAST_DECREASE = 1e-4  # of what the slope promises (Armijo)
_FLOOR = 1e-2  # of the squared residual at the start: below, tolerances are relative to this


class LinearSystem(Protocol):
    """A matrix A (m, n) that is never written out: its products, and those of its columns that are asked for."""

    def apply(self, weights: Vector) -> Float[Tensor, " m"]:
        """A·w."""
        ...

    def pull_back(self, residual: Float[Tensor, " m"]) -> Vector:
        """Aᵀ·r."""
        ...

    def columns(self, chosen: Int[Tensor, " s"]) -> Float[Tensor, "m s"]:
        """Some columns of A."""
        ...


@dataclass(frozen=True)
class DenseSystem:
    """A matrix that is written out."""

    matrix: Float[Tensor, "m n"]

    def apply(self, weights: Vector) -> Float[Tensor, " m"]:
        """A·w."""
        return self.matrix @ weights

    def pull_back(self, residual: Float[Tensor, " m"]) -> Vector:
        """Aᵀ·r."""
        return self.matrix.T @ residual

    def columns(self, chosen: Int[Tensor, " s"]) -> Float[Tensor, "m s"]:
        """Some columns of A."""
        return self.matrix[:, chosen]


def box_least_squares(
    system: LinearSystem,
    values: Float[Tensor, " m"],
    start: Vector,
    lower: Vector,
    upper: Vector,
    *,
    damping: float = 1e-6,
    tolerance: float = 1e-4,
    least_gain: float = 1e-5,
) -> Vector:
    """argmin ‖Aw − y‖² + damping·‖w − start‖² over lower ≤ w ≤ upper, by column generation.

    All unknowns but s of them stay at their lower bound. Those s are solved for by projected Newton steps on the Gram
    matrix of their columns, in float64; then come those whose slope promises most, (Aᵀr)ⱼ², and again, until no Newton
    step gains `tolerance` of the squared residual and no unknown promises `least_gain` of it.
    Limits: columns should be near norm 1, as the promise of an unknown is measured in them.
    Cost: a product with Aᵀ and s³/3 a Newton step in each of a few rounds; s is about the number of unknowns off their
    lower bound, not n.
    Source: Bertsekas, Projected Newton Methods, SIAM J. Control and Optimization 20 (1982).
    """
    is_open = upper > lower
    rest = values - system.apply(lower)
    shift = damping * (start - lower)
    floor = _FLOOR * float((values - system.apply(start)).double().square().sum())
    chosen = is_open & (start > lower)
    if int(chosen.sum()) > _MOST_AT_FIRST:
        slopes = (system.pull_back(rest) + shift).masked_fill(~is_open, 0.0)
        chosen = torch.zeros_like(is_open)
        chosen[slopes.topk(min(_AT_FIRST, len(slopes))).indices] = True
        chosen &= slopes > 0
        begin = torch.zeros_like(start)
    else:
        begin = torch.minimum(start, upper) - lower
    restricted = _Restricted.of(system, rest, chosen.nonzero()[:, 0], shift)
    weights = begin[restricted.indices].double().cpu().numpy()
    for _ in range(_MAX_ROUNDS):
        room = (upper - lower)[restricted.indices].double().cpu().numpy()
        weights, value = restricted.solve(room, weights, damping, tolerance, floor)
        slopes = system.pull_back(restricted.left(weights).to(rest)) + shift
        slopes = slopes.masked_fill(~is_open | chosen, 0.0).clamp_min(0)
        best = slopes.topk(min(_AT_ONCE, len(slopes)))
        further = best.indices[best.values.double().square() > least_gain * max(value, floor)]
        if len(further) == 0:
            break
        restricted = restricted.add(system, further, shift)
        weights = np.concatenate([weights, np.zeros(len(further))])
        chosen[further] = True
    found = lower.clone()
    found[restricted.indices] += torch.from_numpy(weights).to(lower)
    return found.clamp(lower, upper)


@dataclass(frozen=True)
class _Restricted:
    """The problem of some columns C: their Gram matrix CᵀC and their products with the rest r, all in float64."""

    indices: Int[Tensor, " s"]
    columns: Float[Tensor, "m s"]
    rest: Float[Tensor, " m"]
    gram: Float[Tensor, "s s"]
    products: Float[Tensor, " s"]

    @classmethod
    def of(cls, system: LinearSystem, rest: Tensor, indices: Int[Tensor, " s"], shift: Vector) -> _Restricted:
        """Of a few columns; `shift` is what the damping adds to their products."""
        columns, rest = system.columns(indices).double(), rest.double()
        return cls(indices, columns, rest, columns.T @ columns, columns.T @ rest + shift[indices].double())

    def add(self, system: LinearSystem, indices: Int[Tensor, " t"], shift: Vector) -> _Restricted:
        """With further columns."""
        new = system.columns(indices).double()
        mixed = self.columns.T @ new
        gram = torch.cat([torch.cat([self.gram, mixed], 1), torch.cat([mixed.T, new.T @ new], 1)])
        products = torch.cat([self.products, new.T @ self.rest + shift[indices].double()])
        return _Restricted(
            torch.cat([self.indices, indices]), torch.cat([self.columns, new], 1), self.rest, gram, products
        )

    def left(self, weights: Array) -> Float[Tensor, " m"]:
        """What the columns leave of the rest."""
        return self.rest - self.columns @ torch.from_numpy(weights).to(self.columns)

    def solve(self, room: Array, weights: Array, damping: float, tolerance: float, floor: float) -> tuple[Array, float]:
        """The weights in 0 ≤ w ≤ room, from some on, and the squared residual that they leave."""
        gram = self.gram.cpu().numpy().copy()
        gram[np.diag_indices(len(gram))] += damping
        products, constant = self.products.cpu().numpy(), float(self.rest @ self.rest)
        return _project_newton(gram, products, constant, room, weights, tolerance, floor)


def _project_newton(
    gram: Array, products: Array, constant: float, room: Array, weights: Array, tolerance: float, floor: float
) -> tuple[Array, float]:
    """argmin wᵀHw − 2gᵀw + constant over 0 ≤ w ≤ room: Newton steps in what is free to move, clipped and halved."""
    slope = gram @ weights - products
    value = float(weights @ (slope - products)) + constant
    for _ in range(_MAX_NEWTON_STEPS):
        free = np.flatnonzero(((weights > 0) | (slope < 0)) & ((weights < room) | (slope > 0)))
        _, step, failed = dposv(gram[np.ix_(free, free)], -slope[free], lower=1) if len(free) else (0, slope[free], 0)
        if failed or -(slope[free] @ step) <= tolerance * max(value, floor):
            break
        direction = np.zeros_like(weights)
        direction[free] = step
        for halving in range(_MAX_HALVINGS):
            moved = np.clip(weights + 0.5**halving * direction, 0, room)
            there = gram @ moved - products
            reached = float(moved @ (there - products)) + constant
            if reached <= value + 2 * _LEAST_DECREASE * float(slope @ (moved - weights)):
                break
        else:
            break
        gained = value - reached
        weights, slope, value = moved, there, reached
        if gained <= tolerance * max(value, floor):
            break
    return weights, max(value, 0.0)


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
