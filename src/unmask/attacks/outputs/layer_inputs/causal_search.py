"""Causal attention, position by position: each row's input is found given the earlier ones, all branches searched.

    x_1 = y_1;   row i:  y_i = Σ_{k<i} f_k x_k + f_i x,   so  x = y_i + Σ_{k<i} g_k (y_i − x_k),  g_k = f_k / f_i

x − y_i lies in the span of the differences y_i − x_k, so a row has q = rank ≤ min(i − 1, r) unknowns. A row may have
several exact solutions; each is a branch, and depth-first search follows all of them. A branch after which some row has
no solution is dead. Where norms of rows are known, a row has one equation more, and other solutions are dropped.

Theorem (two tokens): with δ = y_2 − x_1, a = x_1ᵀWδ, b = δᵀWδ and g = (1 − p)/p, p = f_22, the second row is
    log g + a(1 + g) + b(1 + g)² = 0   (⇔ logit p = a/p + b/p²).
Its derivative has the zeros of 2b·g² + (a + 2b)·g + 1, at most two, so between them every root is found by bisection:
at most 3 in all. If b < 0 both ends go to −∞, and their number is even: a second pre-image exists.

Notation: as in `problem.py`; rows are those of the reduced problem.
Limits: for q ≥ 2 the solutions of a row are searched, not enumerated; a dead end may be a missed branch.
Cost: for each node one batch of Levenberg–Marquardt with q ≤ n − 1 unknowns.
Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem
from unmask.attacks.outputs.layer_inputs.starts import search_in_batches
from unmask.attacks.run import Progress, silent
from unmask.solvers.iterate import iterate
from unmask.solvers.levenberg_marquardt import LevenbergMarquardt

_LOG_RANGE = 700.0  # exp(±700) are the ends of float64
_MOST_LEAVES = 128  # more are a continuum, as where attention is saturated: no search ends there
_REPEATED = 1e-10  # a row so near to an earlier token, by its norm, is that token up to rounding
_UNSEEN = 20.0  # e⁻²⁰: a token that gives itself this little weight hides in what is left to rounding
_CLOSE = 1e-6  # of ‖y‖: from there Newton's method on the square system takes over
_SAME_NORM = 1e-4  # relative error of a norm that only other solutions have
_RANK = 1e-10  # differences shorter than this share of the longest add no direction
_LENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)  # structured starts: y + t·(y − mean), as if t = Σ g_k
_SHORTEST, _LONGEST = 0.1, 30.0  # random starts, in units of the differences: x is far from y where f_i is small


@dataclass(frozen=True)
class RowProblem:
    """One row given the earlier ones: c ↦ Dᵀ(x̄(x) − y) with x = y + D c; below it ‖y‖(‖x‖²/ρ² − 1)/2, if ρ is known."""

    W: Float[Tensor, "r r"]
    earlier: Float[Tensor, "m r"]
    y: Float[Tensor, " r"]
    directions: Float[Tensor, "r q"]
    norm: float | None = None

    def inputs(self, cs: Float[Tensor, "k q"]) -> Float[Tensor, "k r"]:
        """x of each c."""
        return self.y + cs @ self.directions.mT

    def residuals(self, cs: Float[Tensor, "k q"]) -> Float[Tensor, "k q"]:
        """What is missing of y, in the directions in which anything can be missing."""
        x = self.inputs(cs)
        f = self._weights(x)
        mixed = f[:, :-1] @ self.earlier + f[:, -1:] * x
        missing = (mixed - self.y) @ self.directions
        if self.norm is None:
            return missing
        length = self.y.norm() / 2 * (x.square().sum(1, keepdim=True) / self.norm**2 - 1)
        return torch.cat([missing, length], dim=1)

    def jacobian(self, c: Float[Tensor, " q"]) -> Float[Tensor, "e q"]:
        """At one point."""
        return self.jacobians(c[None])[0]

    def jacobians(self, cs: Float[Tensor, "k q"]) -> Float[Tensor, "k e q"]:
        """Dᵀ(f_i I + Σ_k f_k (x_k − x̄) ∇S_kᵀ)D, with ∇S_k = W x_k and, for the row itself, (W + Wᵀ)x."""
        x = self.inputs(cs)
        f = self._weights(x)
        k = len(x)
        tokens = torch.cat([self.earlier.expand(k, -1, -1), x[:, None]], dim=1)
        mixed = (f[:, None] @ tokens)[:, 0]
        offsets = f[:, :, None] * (tokens - mixed[:, None])
        slopes = tokens @ self.W.mT
        slopes[:, -1] += x @ self.W
        J = (offsets @ self.directions).mT @ (slopes @ self.directions)
        J.diagonal(dim1=1, dim2=2).add_(f[:, -1:])
        if self.norm is None:
            return J
        return torch.cat([J, (self.y.norm() / self.norm**2 * x @ self.directions)[:, None]], dim=1)

    def _weights(self, x: Float[Tensor, "k r"]) -> Float[Tensor, "k m+1"]:
        z = x @ self.W
        scores = torch.cat([z @ self.earlier.mT, (z * x).sum(1, keepdim=True)], dim=1)
        return scores.softmax(-1)


@dataclass(frozen=True)
class RowSolutions:
    """Inputs of a row; `power` is the share of starts that converged, 1 where the solutions were enumerated."""

    inputs: tuple[Float[Tensor, " r"], ...]
    power: float
    enumerated: bool


@dataclass(frozen=True)
class Branches:
    """Leaves of the search: whole inputs. `power` is the least of all rows; `complete`: every row was enumerated."""

    leaves: tuple[Float[Tensor, "n r"], ...]
    num_nodes: int
    budget_ended: bool
    power: float
    complete: bool


def search_branches(
    problem: AttentionProblem,
    *,
    norms: Float[Tensor, " n"] | None = None,
    tolerance: float,
    num_starts: int,
    max_nodes: int,
    generator: torch.Generator,
    progress: Progress = silent,
) -> Branches:
    """Depth first; solutions of a row that are nearest to its output are followed first."""
    Y = problem.Y
    stack = [Y[:0]]
    leaves: list[Tensor] = []
    num_nodes, power, complete = 0, 1.0, True
    while stack and num_nodes < max_nodes and len(leaves) < _MOST_LEAVES:
        rows = stack.pop()
        if len(rows) == len(Y):
            leaves.append(rows)
            continue
        num_nodes += 1
        progress("searching branches", len(rows), len(Y))
        norm = None if norms is None else float(norms[len(rows)])
        found = solve_row(problem.W, rows, Y[len(rows)], tolerance, num_starts, generator, norm)
        power, complete = min(power, found.power), complete and found.enumerated
        nearest_last = sorted(found.inputs, key=lambda x: -float((x - Y[len(rows)]).norm()))
        stack += [torch.cat([rows, x[None]]) for x in nearest_last]
    return Branches(tuple(leaves), num_nodes, bool(stack), power, complete and not stack)


def solve_row(
    W: Float[Tensor, "r r"],
    earlier: Float[Tensor, "m r"],
    y: Float[Tensor, " r"],
    tolerance: float,
    num_starts: int,
    generator: torch.Generator,
    norm: float | None = None,
) -> RowSolutions:
    """All solutions of one row that can be found (and have its norm, if that is known), and whether those are all."""
    directions = _directions(y - earlier)
    if directions.shape[1] == 0:  # the first row; or all earlier tokens equal y, and so does this one
        return RowSolutions((y,), 1.0, True)
    row = RowProblem(W, earlier, y, directions)
    if len(earlier) == 1:
        delta = y - earlier[0]
        inputs = [y + g * delta for g in two_token_shares(float(earlier[0] @ W @ delta), float(delta @ W @ delta))]
        points = [(x - y) @ directions for x in inputs]
        power, enumerated = 1.0, True
    else:
        size, starts = float(y.norm()), _starts(row, num_starts, generator)
        guided = row if norm is None else replace(row, norm=norm)
        search = search_in_batches(guided, starts, size, tolerance if norm is None else _CLOSE * size, max_steps=60)
        points, power, enumerated = list(search.roots), search.power, False
    polished = [row.inputs(_polish(row, c, tolerance)[None])[0] for c in points]
    if norm is not None:
        polished = [x for x in polished if abs(float(x.norm()) / norm - 1) <= _SAME_NORM]
    return RowSolutions(tuple(polished), power, enumerated)


def is_unseen(W: Float[Tensor, "d d"], Y: Float[Tensor, "n d"], X: Float[Tensor, "n d"]) -> bool:
    """Whether rounding leaves the token of some row open, of the whole layer and one pre-image of it.

    A row that is an earlier token up to rounding is explained by that token again, and just as well by any token that
    gives all but nothing of its attention to itself.
    """
    pairs = ((i, k) for i in range(len(Y)) for k in range(i))
    return any(
        float((Y[i] - X[k]).norm()) <= _REPEATED * float(Y[i].norm()) and _may_hide_behind(W, X[k]) for i, k in pairs
    )


def _may_hide_behind(W: Float[Tensor, "d d"], earlier: Float[Tensor, " d"]) -> bool:
    """Whether some token x may give nearly all of its weight to an earlier one: xᵀWx_k − xᵀWx ≥ 20.

    The largest value of the left side is ¼(Wx_k)ᵀS⁻¹(Wx_k) with S = sym(W) ≻ 0; else it has no bound.
    """
    values, vectors = torch.linalg.eigh((W + W.mT) / 2)
    if float(values[0]) <= 0:
        return True
    return float(((vectors.mT @ (W @ earlier)).square() / values).sum() / 4) >= _UNSEEN


def two_token_shares(a: float, b: float) -> list[float]:
    """Every g > 0 with log g + a(1 + g) + b(1 + g)² = 0, in rising order: none, or up to three.

    A root below all numbers, where a token sees nothing but itself, is 0.
    """

    def height(log_g: float) -> float:
        g = math.exp(log_g)
        return log_g + a * (1 + g) + b * (1 + g) ** 2

    low, high = -_LOG_RANGE, _LOG_RANGE / 2 - 10  # squares of g must stay finite
    turns = [math.log(g) for g in _quadratic(2 * b, a + 2 * b, 1.0) if 0 < g < math.inf]
    ends = [low, *(turn for turn in sorted(turns) if low < turn < high), high]
    heights = [height(u) for u in ends]
    shares = [math.exp(u) for u, v in zip(ends, heights, strict=True) if v == 0]
    if heights[0] > 0:  # it falls to −∞ for g → 0
        shares.append(0.0)
    for low, high, below, above in zip(ends, ends[1:], heights, heights[1:], strict=False):
        if below < 0 < above or above < 0 < below:
            shares.append(math.exp(brentq(height, low, high, xtol=1e-15, rtol=1e-15, maxiter=500)))
    return sorted(shares)


def _quadratic(a: float, b: float, c: float) -> list[float]:
    """Real zeros of a·t² + b·t + c, without cancellation."""
    if a == 0:
        return [-c / b] if b else []
    square = b * b - 4 * a * c
    if square < 0:
        return []
    q = -(b + math.copysign(math.sqrt(square), b)) / 2
    return [q / a, c / q] if q else [0.0]


def _directions(differences: Float[Tensor, "m r"]) -> Float[Tensor, "r q"]:
    """An orthonormal basis of what the differences span."""
    if len(differences) == 0:
        return differences.mT[:, :0]
    _, sizes, directions = torch.linalg.svd(differences, full_matrices=False)
    return directions[sizes > _RANK * sizes[0]].mT.contiguous() if float(sizes[0]) > 0 else directions[:0].mT


def _starts(row: RowProblem, num_starts: int, generator: torch.Generator) -> Float[Tensor, "k q"]:
    """y itself, points on the ray from the mean of the earlier tokens over y, and noise of all sizes."""
    away = (row.y - row.earlier.mean(dim=0)) @ row.directions
    structured = [torch.zeros_like(away), *(length * away for length in _LENGTHS)]
    noise = torch.randn(max(0, num_starts - len(structured)), len(away), generator=generator, dtype=away.dtype)
    lengths = torch.logspace(math.log10(_SHORTEST), math.log10(_LONGEST), len(noise), dtype=away.dtype)[:, None]
    typical = (row.y - row.earlier).norm(dim=1).mean() / len(away) ** 0.5
    return torch.cat([torch.stack(structured), noise * lengths * typical])


def _polish(row: RowProblem, c: Tensor, tolerance: float) -> Tensor:
    """A few Newton steps more: errors of a row are passed on to all later ones."""
    return iterate(LevenbergMarquardt(1e-3 * tolerance), row, c, max_steps=5).state.x
