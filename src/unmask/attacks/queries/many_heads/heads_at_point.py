"""All heads at one y, to the last digit: a first look, then what isolation reads, until predictions hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.clusters import find_suspects, open_cluster
from unmask.attacks.queries.many_heads.gating import first_look
from unmask.attacks.queries.many_heads.head_units import Units
from unmask.attacks.queries.many_heads.head_values import all_off, totals
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.resolution import NoPlane, Resolution

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
