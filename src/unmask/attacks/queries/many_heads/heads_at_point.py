"""All heads at one y, to the last digit: a first look, then what isolation reads, until predictions hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.gating import first_look
from unmask.attacks.queries.many_heads.head_units import Units
from unmask.attacks.queries.many_heads.head_values import all_off, still_moves, totals
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.resolution import NoPlane, Resolution
from unmask.linalg.rational import fit_sigmoids

_ROUNDS = 8
_NUM_PREDICTIONS = 4


@dataclass(frozen=True, eq=False)
class HeadsAtPoint:
    """The units of heads at y, how they are isolated, and the pairs with what is linear besides taken away."""

    y: Float[Tensor, " d"]
    isolation: Isolation
    pairs: Pairs

    @property
    def units(self) -> Units:
        return self.isolation.units

    @property
    def w(self) -> Float[Tensor, "k d"]:
        return self.isolation.w


class MoreHeadsThanWidth(Exception):  # noqa: N818 (an ending, not an error)
    """More heads turn on or off than a token has entries, so that they cannot be isolated."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__(
            f"{num_heads} heads turn on and off, but a token has {width} entries: so many cannot be isolated."
        )


def find_heads(
    pairs: Pairs, y: Float[Tensor, " d"], resolution: Resolution, generator: torch.Generator
) -> HeadsAtPoint | None:
    """The heads at y; None where no head turns on or off, as with W = 0.

    Limits: raises `NoPlane` where this y, or the plane that was drawn, does not show them.
    Cost: that of the first look, and (2·width + 6) queries a unit and round; one round is the rule.
    """
    look = first_look(pairs, y, resolution, generator)
    if len(look.v) == 0:
        return None
    if len(look.v) > len(y):
        raise MoreHeadsThanWidth(len(look.v), len(y))
    units, w, last = Units.single(look.v), look.w, math.inf
    pairs = replace(pairs, linear=look.linear)
    for _ in range(_ROUNDS):
        isolation, pairs = _values(pairs, y, Isolation.at(units, w, resolution))
        isolation = Isolation.at(isolation.units, isolation.columns(pairs, y[None])[0], resolution)
        w, units = isolation.w, isolation.units
        off = float(isolation.misprediction(pairs, y[None], w[None], generator, _NUM_PREDICTIONS)[0])
        # The heads of a cluster hang together: rounds go on while they gain digits.
        if off < isolation.allowed and (not units.has_clusters or off > last / 10):
            return HeadsAtPoint(y, isolation, pairs)
        if not units.has_clusters:
            for unit in find_suspects(pairs, y, isolation):
                units, w = open_cluster(pairs, y, Isolation.at(units, w, resolution), unit, is_open=False)
        last = off
    raise NoPlane("predictions of the answers fail")


def _values(pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation) -> tuple[Isolation, Pairs]:
    """v of every unit, and the linear term, read again."""
    if pairs.linear is not None:
        pairs = replace(pairs, linear=all_off(replace(pairs, linear=None), y, isolation))
    units, w, resolution = isolation.units, isolation.w, isolation.resolution
    sums = totals(pairs, y, isolation)
    if not bool((sums.norm(dim=1) > 0).all()):
        raise NoPlane("a head answers nothing where it should be on")
    for unit in range(len(units)):
        if units.num_heads(unit) == 1:
            units = units.with_members(unit, sums[unit : unit + 1], units.slopes[unit, :1])
        else:
            units, w = open_cluster(pairs, y, Isolation.at(units, w, resolution), unit, is_open=True)
    return Isolation.at(units, w, resolution), pairs


_MOST_MEMBERS = 3
# Copies of the first token and of the second: ratios from 1/16 to 16.
_FEW = ((1, 16), (1, 12), (1, 8), (1, 6), (1, 4), (1, 3), (1, 2), (2, 3))
_COUNTS = (*_FEW, (1, 1), *[(k, n) for n, k in reversed(_FEW)])
_MOVE = 0.4  # of a score: the unit must stay on one side of zero, so that its heads keep their order
_CENTRE = -2.0


def find_suspects(pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation) -> list[int]:
    """Units that do not answer as one head does: a score that moves by 2.5 along the dual must be read so.

    Cost: two queries a unit.
    """
    units = torch.arange(len(isolation.w), device=y.device)
    at_base, moved = (
        isolation.units.scores(pairs(U, y), U, units) for U in (isolation.bases, isolation.bases + 2.5 * isolation.dual)
    )
    is_one_head = (moved - at_base - 2.5).abs() < 1e4 * isolation.resolution.prediction
    return units[~is_one_head].tolist()


def open_cluster(
    pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation, unit: int, is_open: bool
) -> tuple[Units, Float[Tensor, "k d"]]:
    """The same units with one opened into its heads, and the directions w with that of its first head.

        F(ρ) = Σ_i (v_iᵀu)·ρ/(ρ + e^{−t_i}),    t_i = λ_i·uᵀw

    for k copies of one token and l of the other, ρ = k/l: the rational fit gives v_iᵀu and t_i at every probe, and
    from these v_i, w and the multiples λ_i follow by least squares. Where it `is_open` already, w is known well enough
    for long probes that hardly change a score, which gains the digits that short ones lose.

    Limits: two or three heads, λ > 0. Raises `NoPlane` where they do not explain the answers.
    Cost: 17 queries for each of width + 1 probes.
    Source: the partial fractions are those of Kim, Kim, Guo, arXiv 2608.03294; isolating the cluster first is ours.
    """
    w, dual = isolation.w[unit], isolation.dual[unit]
    centre = isolation.bases[unit] + (_CENTRE - isolation.bases[unit] @ w) * dual
    if is_open:
        moves = torch.cat([still_moves(isolation, centre, {unit: 0.0}), _MOVE * dual[None]])
    else:
        Q = isolation.probes[unit]
        moves = Q * (_MOVE / (Q @ w).abs().clamp_min(w.norm() * Q.norm(dim=1) / len(w) ** 0.5))[:, None]
    U = torch.cat([centre[None], centre + moves])
    values = torch.stack([pairs(U, y, copies, repeats) for copies, repeats in _COUNTS], dim=1)
    rho = torch.tensor([copies / repeats for copies, repeats in _COUNTS], dtype=torch.float64, device=y.device)
    fit = fit_sigmoids(rho, values, _MOST_MEMBERS, 3 * isolation.resolution.precision * values.abs().max(1).values)
    if not bool(fit.explained.all()) or fit.t.shape[1] < 2 or not bool((fit.t < 0).all()):
        raise NoPlane("heads that turn on together are not multiples of one another, or more than three")
    slopes = (fit.t / fit.t[:, :1]).median(0).values
    v = torch.linalg.lstsq(U, fit.c, driver="gels").solution.T
    new_w = isolation.w.clone()
    new_w[unit] = torch.linalg.lstsq(U, fit.t[:, :1], driver="gels").solution[:, 0]
    return isolation.units.with_members(unit, v, slopes), new_w
