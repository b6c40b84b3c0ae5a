"""The first column of W: the scale of W is found while its entries are read, so that no query is spent on it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.one_head.boosted_probes import MOST_READABLE, BoostedProbes, ScoreReader

_SEEN_FROM = 5  # times the error of t: a pilot below shows nothing of W
_STEP = 1e3  # of the search for a W that the pilot does not show
_NUM_PILOTS = 12
_NUM_PAIRS = 8  # at each step of that search: all of them near a zero of W is one case in 10⁵
_LARGEST_SCALE = 1e18  # tokens of norm 10⁹, far from overflow even in float32
# The largest |t| that is aimed at, by how many values are known. One value may be small by chance: after one, a next
# that is 150 times as large would still be readable, and that is so in 99.6 % of cases.
_AIMS = ((1, 0.03), (2, 0.2), (4, 0.6), (8, 1.2), (32, 2.0))
_LEGIBLE = 300  # times the error of t: aiming lower would read nothing
# How much smaller than the final scale one may be that a value was read at. Such values are a few of d², so that five
# decades cost exact arithmetic nothing that shows; where an answer has few digits, one decade is all there is to give.
_MOST_LOST, _LEAST_LOST, _EXACT = 1e5, 10.0, 1e-10


def read_first(
    reader: ScoreReader, probes: BoostedProbes, Y: Float[Tensor, "m d"], generator: torch.Generator
) -> tuple[int, Float[Tensor, " d"]] | None:
    """A row y of Y and uᵢᵀWy for all probes, at a W of unknown scale; None where W cannot be told from 0.

    The row is the first, unless Wy is too small there to be seen. The first query is the pilot. It is asked at
    s = √d, where |t| is about 1 for weights of the usual size, and its answer is one of the equations, so that a
    column takes d queries. A W that is 10⁻⁵ as large still shows; the pilot's entry then has five digits less, which
    is one entry of d². The next queries come in batches of 1, 2, 4, …, each at the scale that the values before it
    suggest. Values that come out NaN were readable at no scale.

    Limits: more queries where the pilot saturates (about one for each factor of 30) or shows nothing (one for each
    row of Y, and more for a smaller W), or where answers have few digits (the first values are read again).
    Cost: d queries where the pilot is readable.
    """
    U, place = probes.directions, 0
    pilot = _pilot(reader, U[0], Y[0], min(math.sqrt(U.shape[1]), reader.largest_scale))
    if pilot is None:
        return place, torch.full_like(Y[0], math.nan)
    t, scale = pilot
    if abs(t) < _SEEN_FROM * reader.error(scale):
        found = _scale_elsewhere(reader, probes, scale, generator)
        if found is None:
            return None
        seen = reader.scores(U[:1].expand_as(Y), Y, found)
        place = int(seen.nan_to_num().abs().argmax())
        t, scale = float(seen[place]) * found, found
    y, values, scales = Y[place], U.new_tensor([t / scale]), U.new_tensor([scale])
    while len(values) < len(U):
        batch = U[len(values) : 2 * len(values)]
        scale = _aimed_scale(reader, values, scale)
        values = torch.cat([values, reader.scores(batch, y.expand_as(batch), scale)])
        scales = torch.cat([scales, scales.new_full([len(batch)], scale)])
    lost = max(_LEAST_LOST, min(_MOST_LOST, _EXACT / reader.error(scale)))
    again = scales * lost < scale
    if again.any():
        values[again] = reader.scores(U[again], y.expand_as(U[again]), scale)
    return place, values


def _aimed_scale(reader: ScoreReader, values: Float[Tensor, " k"], scale: float) -> float:
    """The scale at which the next |t| are about as large as they may be, given values of the same kind."""
    largest = float(values.nan_to_num().abs().max())
    if largest == 0:
        return scale
    aim = [aim for num_known, aim in _AIMS if num_known <= len(values)][-1]
    return min(max(aim, min(_AIMS[3][1], _LEGIBLE * reader.error(scale))) / largest, reader.largest_scale)


def _pilot(
    reader: ScoreReader, u: Float[Tensor, " d"], y: Float[Tensor, " d"], scale: float
) -> tuple[float, float] | None:
    """t of the first pair and the scale that makes it readable; None where none does."""
    for _ in range(_NUM_PILOTS):
        t = float(reader.read(u[None], y[None], u.new_tensor([scale])))
        if abs(t) < MOST_READABLE:
            return t, scale
        scale *= 1.5 / abs(t) if math.isfinite(t) else 1 / 30
    return None


def _scale_elsewhere(
    reader: ScoreReader, probes: BoostedProbes, scale: float, generator: torch.Generator
) -> float | None:
    """A scale for a W that the pilot did not show, from pairs in general position; None where none is large enough.

    A pilot can meet a zero of W; random pairs cannot, unless W = 0.
    """
    largest = min(_LARGEST_SCALE, reader.largest_scale)
    while True:
        U, Y = torch.randn(2, _NUM_PAIRS, len(probes.v), generator=generator, dtype=torch.float64).to(probes.v)
        U, Y = BoostedProbes(U / U.norm(dim=1, keepdim=True), probes.v).directions, Y / Y.norm(dim=1, keepdim=True)
        size = float(reader.scores(U, Y, scale).abs().nan_to_num().max())
        error = reader.error(scale)
        if size * scale >= _SEEN_FROM * error:
            return min(1 / size, largest)
        if scale >= largest:
            return None
        scale = min(scale * max(3.0, min(_STEP, 1 / (_SEEN_FROM * error))), largest)
