"""Sums of a few sigmoids in the logarithm of a ratio, which are rational functions: their heights and their shifts.

    F(ρ) = Σ_h c_h·ρ/(ρ + e^{−t_h}) = Σ_h c_h·σ(log ρ + t_h)

The poles lie at −e^{−t_h}. The unknowns c enter linearly, so shifts are searched on a grid with the best c for each
combination: that is the start where noise is large. Where it is small, the poles of the linearised fit P − F·Q ≈ 0
are the better start. The best of them are polished by Levenberg–Marquardt in (c, t).
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.errors import InputError
from unmask.progress import track

MOST_HEADS = 3  # a head costs two to three decades of conditioning (benchmarks/run.py queries repetition)
# Standard deviations that noise explains: in a single row, whose noise may be larger than it is said to be, and in the
# median of rows, where a head that shows in half of them must not pass for noise.
EXPLAINED, EXPLAINED_TOGETHER = 6.0, 2.0
_OUTLIERS = 0.1  # of rows may stay unexplained: a polish that failed must not add a head to all
_SPACING, _MARGIN = 0.5, 4.0  # of the grid of shifts: a sigmoid is 2 wide; beyond the margin it is a constant
_NUM_STARTS, _NUM_REWEIGHTINGS = 4, 3
_SMALLEST = 1e-12  # of e^{−t}: further out a head is a constant, or nothing, in float64
_ROWS = 256  # at once: a grid of 5,000 combinations for each of them takes 30 MB
_LONGEST_STEP = 3.0  # in t, in one step: as far as a sigmoid's slope can be trusted
_LEAST_DAMPING, _MOST_DAMPING = 1e-16, 1e8


class SigmoidFit(NamedTuple):
    """Heads of every row, by growing t; `residual` is the rms of what is left, errors are one standard deviation."""

    c: Float[Tensor, "b h"]
    t: Float[Tensor, "b h"]
    residual: Float[Tensor, " b"]
    c_error: Float[Tensor, "b h"]
    t_error: Float[Tensor, "b h"]
    explained: Bool[Tensor, " b"]


def fit_sigmoids(
    rho: Float[Tensor, " k"], values: Float[Tensor, "b k"], max_heads: int, noise: float | Float[Tensor, " b"]
) -> SigmoidFit:
    """The fewest sigmoids that explain the values, one number of heads for all rows.

        min_{c, t} Σ_k (F(ρ_k) − values_k)²,    errors² = σ²·diag (JᵀJ)⁻¹,    σ = max(noise, residual)

    Notation: ρ > 0 the ratios, ∞ allowed; b rows of values at the same ratios; `noise` the standard deviation of a
    value, one number or one for every row; J = ∂F/∂(c, t), H the number of heads. H is the smallest with which all but
    a tenth of the rows (all, of less than ten) are explained, residual ≤ 6·noise, and the median of rows is within
    2·noise; where none does both, the first will do. With none of these `max_heads` are returned, and `explained`
    tells which rows they fail.
    Limits: at most three heads. Shifts further than 4 outside of −log ρ are seen only through a constant or c·eᵗ·ρ.
    Heads whose t is closer than noise resolves have a large t_error, or count as one.
    Cost: k ≥ 2H + 1 values a row; a grid of 30 shifts, C(30, H) combinations, then some thirty small QRs a row.
    Source: the partial fractions are those of Kim, Kim, Guo, arXiv 2608.03294 (token repetition); the fit is ours.
    """
    if not 0 <= max_heads <= MOST_HEADS:
        raise InputError(f"max_heads must be 0 to {MOST_HEADS}, got {max_heads}; more cannot be told apart.")
    if rho.ndim != 1 or values.ndim != 2 or values.shape[1] != len(rho) or not bool((rho > 0).all()):
        raise InputError(
            "rho must be (k,) and positive, and values (b, k), "
            f"got rho {tuple(rho.shape)} from {float(rho.min()):g} on and values {tuple(values.shape)}."
        )
    if len(rho) < 2 * max_heads + 1:
        raise InputError(f"{max_heads} heads need {2 * max_heads + 1} ratios or more, got {len(rho)}.")
    log_rho, values = rho.double().log(), values.double()
    noise = torch.as_tensor(noise, dtype=torch.float64, device=values.device).expand(len(values))
    fits = list[SigmoidFit]()
    for num_heads in track(range(max_heads + 1), "fitting sums of sigmoids"):
        parts = [
            _fit(log_rho, part, num_heads, level)
            for part, level in zip(values.split(_ROWS), noise.split(_ROWS), strict=True)
        ]
        fits.append(SigmoidFit(*map(torch.cat, zip(*parts, strict=True))))
        if _is_enough(fits[-1]) and float((fits[-1].residual / noise).median()) <= EXPLAINED_TOGETHER:
            return fits[-1]
    return next((fit for fit in fits if _is_enough(fit)), fits[-1])


def _is_enough(fit: SigmoidFit) -> bool:
    """Whether so many heads explain all rows, but for a tenth of ten or more."""
    return float((~fit.explained).double().mean()) <= (_OUTLIERS if len(fit.explained) >= 10 else 0)


def fit_shifts(
    rho: Float[Tensor, " k"], values: Float[Tensor, "b k"], c: Float[Tensor, "b h"]
) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]:
    """The shifts of heads whose heights are known, and their spread for errors of one in every value.

    Starts are the best points of a grid, where ‖F − values‖² needs nothing but products of pairs, and the fit with free
    heights, in every order of its heads.
    Notation: as in `fit_sigmoids`. Heads keep the order of c.
    Limits: heads of equal height cannot be told apart, and come in any order.
    """
    log_rho, num_heads = rho.double().log(), c.shape[1]
    size = values.square().mean(1, keepdim=True).sqrt().clamp_min(1e-300)
    values, c = values / size, c / size
    free = _fit(log_rho, values, num_heads, torch.zeros_like(values[:, 0])).t
    orders = torch.tensor(list(itertools.permutations(range(num_heads))), device=c.device)
    starts = torch.cat([_heights_on_grid(log_rho, values, c), free[:, orders]], dim=1)
    num_starts = starts.shape[1]
    repeated, heights = (part.repeat_interleave(num_starts, dim=0) for part in (values, c))
    _, t = polish_sigmoids(log_rho, repeated, heights, starts.flatten(0, 1), max_steps=40, heights_known=True)
    left = (sum_of_sigmoids(log_rho, heights, t) - repeated).square().sum(1).reshape(len(values), -1)
    t = t[left.argmin(1) + torch.arange(len(values), device=t.device) * num_starts]
    return t, _spread(_jacobian(log_rho, c, t)[:, :, num_heads:]) / size


def _heights_on_grid(
    log_rho: Float[Tensor, " k"], values: Float[Tensor, "b k"], c: Float[Tensor, "b h"]
) -> Float[Tensor, "b s h"]:
    """Of all shifts on the grid those that fit best with these heights."""
    grid, num_heads = shift_grid(log_rho), c.shape[1]
    sigmoids = torch.sigmoid(log_rho[:, None] + grid)
    gram, fit = sigmoids.mT @ sigmoids, values @ sigmoids

    def along(table: Tensor, *heads: int) -> Tensor:
        """A table over the shifts of one or two heads, as a part of the table over the shifts of all."""
        return table.reshape(-1, *[len(grid) if h in heads else 1 for h in range(num_heads)])

    cost = values.new_zeros(len(values), *[len(grid)] * num_heads)
    for h in range(num_heads):
        cost = cost + along(c[:, h, None].square() * gram.diagonal() - 2 * c[:, h, None] * fit, h)
        for g in range(h):
            cost = cost + along(2 * (c[:, g] * c[:, h])[:, None, None] * gram, g, h)
    best = cost.flatten(1).topk(_NUM_STARTS, dim=1, largest=False).indices
    return torch.stack([grid[best // len(grid) ** (num_heads - 1 - h) % len(grid)] for h in range(num_heads)], dim=2)


def sum_of_sigmoids(
    log_rho: Float[Tensor, " k"], c: Float[Tensor, "b h"], t: Float[Tensor, "b h"]
) -> Float[Tensor, "b k"]:
    """F at every ratio."""
    return torch.einsum("bh,bkh->bk", c, torch.sigmoid(log_rho[None, :, None] + t[:, None]))


def shift_grid(log_rho: Float[Tensor, " k"]) -> Float[Tensor, " g"]:
    """The shifts that can be told apart with these ratios, half a unit apart."""
    finite = log_rho[log_rho.isfinite()]
    low, high = -float(finite.max()) - _MARGIN, -float(finite.min()) + _MARGIN
    return torch.linspace(low, high, 1 + math.ceil((high - low) / _SPACING), dtype=torch.float64, device=log_rho.device)


def _fit(
    log_rho: Float[Tensor, " k"], values: Float[Tensor, "b k"], num_heads: int, noise: Float[Tensor, " b"]
) -> SigmoidFit:
    """The best fit with a given number of heads."""
    num_values = len(log_rho)
    if num_heads == 0:
        none, residual = values[:, :0], values.square().mean(1).sqrt()
        return SigmoidFit(none, none, residual, none, none, residual <= EXPLAINED * noise)
    size = values.square().mean(1).sqrt().clamp_min(1e-300)
    scaled = values / size[:, None]
    t = torch.cat([_on_grid(log_rho, scaled, num_heads), _linearise(log_rho, scaled, num_heads)], dim=1)
    c = _heights(log_rho, scaled, t)
    repeated = scaled.repeat_interleave(c.shape[1], dim=0)
    c, t = polish_sigmoids(log_rho, repeated, c.flatten(0, 1), t.flatten(0, 1), max_steps=12)
    left = (sum_of_sigmoids(log_rho, c, t) - repeated).square().sum(1).reshape(len(values), -1)
    best = left.argmin(1) + torch.arange(len(values), device=left.device) * left.shape[1]
    c, t = polish_sigmoids(log_rho, scaled, c[best], t[best], max_steps=60)
    order = t.argsort(dim=1)
    c, t = c.gather(1, order), t.gather(1, order)
    # A fit with 2H unknowns leaves that much less; the rms is per degree of freedom.
    left = (sum_of_sigmoids(log_rho, c, t) - scaled).square().sum(1)
    residual = size * (left / max(1, num_values - 2 * num_heads)).sqrt()
    spread = _spread(_jacobian(log_rho, c, t)) * torch.maximum(noise, residual)[:, None]
    c_error, t_error = spread[:, :num_heads], spread[:, num_heads:] / size[:, None]
    return SigmoidFit(c * size[:, None], t, residual, c_error, t_error, residual <= EXPLAINED * noise)


def _on_grid(log_rho: Float[Tensor, " k"], values: Float[Tensor, "b k"], num_heads: int) -> Float[Tensor, "b s h"]:
    """Of all combinations of shifts on the grid those that explain most."""
    shifts, Q = (part.to(values.device) for part in _combinations(tuple(log_rho.tolist()), num_heads))
    captured = torch.einsum("nkh,bk->bnh", Q, values)
    best = captured.square().sum(2).topk(min(_NUM_STARTS, len(shifts)), dim=1).indices
    return shifts[best]


@lru_cache(maxsize=8)  # of 4 MB at three heads: an attack asks thousands of rows at two sets of ratios
def _combinations(log_rho: tuple[float, ...], num_heads: int) -> tuple[Float[Tensor, "n h"], Float[Tensor, "n k h"]]:
    """All combinations of shifts on the grid, and orthonormal bases of what their sigmoids span."""
    logarithms = torch.tensor(log_rho, dtype=torch.float64)
    grid = shift_grid(logarithms)
    places = torch.combinations(torch.arange(len(grid)), num_heads)
    sigmoids = torch.sigmoid(logarithms[:, None] + grid)[:, places].transpose(0, 1)
    return grid[places], torch.linalg.qr(sigmoids).Q


def _linearise(log_rho: Float[Tensor, " k"], values: Float[Tensor, "b k"], num_heads: int) -> Float[Tensor, "b s h"]:
    """Shifts from the poles of z·P/Q, by least squares on (z·P − F·Q)/|Q before|; one start for each reweighting.

    Notation: z = ρ/(1 + ρ); P and Q homogeneous in (z, 1 − z), of degrees H − 1 and H, which keeps numbers of the
    order of one; then Q = Σ_j q_j zʲ(1 − z)^{H−j} has the roots −e^{−t} in ρ. Roots that noise made complex count
    with their absolute value.
    Source: Sanathanan & Koerner, IEEE Trans. Automatic Control 8, 1963 (the reweighting).
    """
    z = torch.sigmoid(log_rho)[:, None]
    powers = torch.arange(num_heads + 1, dtype=torch.float64, device=z.device)
    bottom = z**powers * (1 - z) ** (num_heads - powers)  # (k, H + 1)
    top = z ** powers[:-1] * (1 - z) ** (num_heads - 1 - powers[:-1]) * z
    system = torch.cat([values[:, :, None] * bottom, -top.expand(len(values), -1, -1)], dim=2)
    weight, shifts = torch.ones_like(values), []
    for _ in range(_NUM_REWEIGHTINGS):
        weighted = system * weight[:, :, None]
        norms = weighted.norm(dim=1, keepdim=True).clamp_min(1e-300)
        q = (torch.linalg.svd(weighted / norms).Vh[:, -1] / norms[:, 0])[:, : num_heads + 1]
        shifts.append(-_roots(q).abs().clamp(_SMALLEST, 1 / _SMALLEST).log())
        weight = 1 / (q @ bottom.mT).abs().clamp_min(1e-12 * q.abs().amax(1, keepdim=True))
    return torch.stack(shifts, dim=1)


def _roots(q: Float[Tensor, "b n"]) -> Tensor:
    """Complex roots of Σ_j q_j ρʲ, by the companion matrix."""
    degree = q.shape[1] - 1
    lead = torch.where(q[:, -1:].abs() > 1e-300, q[:, -1:], torch.full_like(q[:, -1:], 1e-300))
    companion = torch.zeros(len(q), degree, degree, dtype=q.dtype, device=q.device)
    companion[:, 1:, :-1] = torch.eye(degree - 1, dtype=q.dtype, device=q.device)
    companion[:, :, -1] = (-q[:, :-1] / lead).clamp(-1e100, 1e100)
    return torch.linalg.eigvals(companion)


def _heights(
    log_rho: Float[Tensor, " k"], values: Float[Tensor, "b k"], t: Float[Tensor, "b s h"]
) -> Float[Tensor, "b s h"]:
    """The best heights for given shifts."""
    sigmoids = torch.sigmoid(log_rho[:, None] + t[:, :, None])  # (b, s, k, h)
    # Equal shifts make the columns dependent; the pseudo-inverse then shares the height between them.
    return (torch.linalg.pinv(sigmoids, rtol=1e-13) @ values[:, None, :, None])[..., 0]


def polish_sigmoids(
    log_rho: Float[Tensor, " k"],
    values: Float[Tensor, "b k"],
    c: Float[Tensor, "b h"],
    t: Float[Tensor, "b h"],
    *,
    max_steps: int,
    heights_known: bool = False,
) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]:
    """Levenberg–Marquardt in (c, t), or in t alone where heights are known; every row with a damping of its own.

        [J·D⁻¹; √λ·I] z = [−r; 0],    (c, t) ← (c, t) + D⁻¹ z

    Notation: r = F − values, D the norms of J's columns. Steps come from QR, since JᵀJ would square a condition that
    reaches 10⁷ at three heads.
    """
    first = c.shape[1] if heights_known else 0
    x, num_heads = torch.cat([c, t], dim=1), c.shape[1]
    rest = sum_of_sigmoids(log_rho, c, t) - values
    damping = torch.full_like(x[:, 0], 1e-3)
    active = torch.ones_like(damping, dtype=torch.bool)
    for _ in range(max_steps):
        rows = active.nonzero()[:, 0]
        if len(rows) == 0:
            break
        J = _jacobian(log_rho, x[rows, :num_heads], x[rows, num_heads:])[:, :, first:]
        norms = J.norm(dim=1).clamp_min(1e-12)  # a saturated sigmoid has no slope, and must not be divided by 0
        weight = damping[rows].sqrt()[:, None, None] * torch.eye(J.shape[2], dtype=J.dtype, device=J.device)
        Q, R = torch.linalg.qr(torch.cat([J / norms[:, None], weight], dim=1))
        slope = torch.einsum("bkm,bk->bm", Q[:, : len(log_rho)], rest[rows])
        step = -torch.linalg.solve_triangular(R, slope[..., None], upper=True)[..., 0] / norms
        step[:, num_heads - first :].clamp_(-_LONGEST_STEP, _LONGEST_STEP)
        moved = x[rows].clone()
        moved[:, first:] += step
        left = sum_of_sigmoids(log_rho, moved[:, :num_heads], moved[:, num_heads:]) - values[rows]
        before, after = rest[rows].square().sum(1), left.square().sum(1)
        is_better = after < before
        x[rows[is_better]], rest[rows[is_better]] = moved[is_better], left[is_better]
        damping[rows] = torch.where(is_better, damping[rows] / 10, damping[rows] * 10).clamp_min(_LEAST_DAMPING)
        active[rows] = damping[rows] <= _MOST_DAMPING
    return x[:, :num_heads], x[:, num_heads:]


def _jacobian(log_rho: Float[Tensor, " k"], c: Float[Tensor, "b h"], t: Float[Tensor, "b h"]) -> Float[Tensor, "b k m"]:
    """∂F/∂(c, t)."""
    sigmoids = torch.sigmoid(log_rho[None, :, None] + t[:, None])
    return torch.cat([sigmoids, c[:, None] * sigmoids * (1 - sigmoids)], dim=2)


def _spread(J: Float[Tensor, "b k m"]) -> Float[Tensor, "b m"]:
    """(diag (JᵀJ)⁻¹)^½, by QR."""
    norms = J.norm(dim=1).clamp_min(1e-300)
    R = torch.linalg.qr(J / norms[:, None]).R
    R.diagonal(dim1=1, dim2=2).masked_fill_(R.diagonal(dim1=1, dim2=2) == 0, 1e-300)
    eye = torch.eye(J.shape[2], dtype=J.dtype, device=J.device).expand_as(R)
    return torch.linalg.solve_triangular(R, eye, upper=True).norm(dim=2) / norms
