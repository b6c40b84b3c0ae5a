"""Where a piecewise sinusoid bends: a ReLU network on a circle around the origin has one kink for each neuron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Angles = Float[Tensor, " b"]
Values = Float[Tensor, " b"]

_NUM_INTERVALS = 16
_INNER = (0.41, 0.73)  # of an interval: no simple fractions, so that neurons in regular places are not missed
_OUTER = 0.08  # of an interval: where its first and last sinusoid are read
_BESIDE = 0.003  # of an interval, at the most: where a kink is verified on both sides
_CLEAR = 10.0  # times what the noise allows: nearer to a kink than that, both sinusoids pass the test
_EXTRAPOLATED = 30.0  # a sinusoid read on 0.08 of an interval carries its error 1/0.08 times as far, with a reserve
_ROUNDED = 1e-15  # of a value: what float64 makes of sums of a few terms, however exact they were
_NARROWEST = 1e-10  # angles are of the order of 1, so an interval of this width has six digits of its own left


class TooManyKinks(Exception):  # noqa: N818 (an ending, not an error)
    """More kinks than were allowed, each of them certain if the function is a piecewise sinusoid."""


@dataclass(frozen=True, eq=False)
class Sinusoid:
    """value·cos(θ − origin) + slope·sin(θ − origin), one for each interval.

    With A·cos θ + B·sin θ the errors of A and B would be those of values over an interval's width.
    """

    origin: Angles
    value: Values
    slope: Values

    def __call__(self, angle: Angles) -> Values:
        """Its values, one angle each."""
        return self.value * (angle - self.origin).cos() + self.slope * (angle - self.origin).sin()

    def move_origin(self, origin: Angles) -> Sinusoid:
        """The same with another origin."""
        by = origin - self.origin
        return Sinusoid(origin, self(origin), self.slope * by.cos() - self.value * by.sin())


def fit_sinusoid(t1: Angles, f1: Values, t2: Angles, f2: Values) -> Sinusoid:
    """The sinusoid of period 2π through two points; its origin is the first."""
    return Sinusoid(t1, f1, (f2 - f1 * (t2 - t1).cos()) / (t2 - t1).sin())


def find_kinks(
    function: Callable[[Angles], Values], start: float, end: float, noise: float, max_kinks: int
) -> Float[Tensor, " m"]:
    """The kinks of a continuous, piecewise sinusoidal function between two angles, in order.

    An interval whose two inner points lie on the sinusoid through its ends has none. In any other the sinusoids at
    its two ends are intersected; if the function follows them up to the intersection from both sides, that is the one
    kink. If not, the interval is cut in three.

    Notation: `noise`, what an answer may be off by. Two kinks closer than the noise can resolve become one between
    them; so does one in an interval of 1e-10.
    Limits: kinks that cancel at all points that were asked are missed. Who peels (`relu_learner.py`) finds both.
    Cost: 6 queries for a kink that is alone, 2 for an empty interval, 4 for one that must be cut.
    Raises: TooManyKinks, as soon as more than `max_kinks` intervals are known to hold one.
    Source: ours; the kinks of ReLU networks on a line are those of Carlini et al., arXiv 2003.04884, §4.
    """
    edges = torch.linspace(start, end, _NUM_INTERVALS + 1, dtype=torch.float64)
    values = function(edges)
    noise = max(noise, _ROUNDED * float(values.abs().max()))
    a, b, fa, fb = edges[:-1], edges[1:], values[:-1], values[1:]
    found: list[Tensor] = []
    num_found = 0
    while len(a):
        width = b - a
        inner = [a + part * width for part in _INNER]
        f_inner = function(torch.cat(inner)).chunk(2)
        chord = fit_sinusoid(a, fa, b, fb)
        bends = torch.stack([(chord(t) - f).abs() > noise for t, f in zip(inner, f_inner, strict=True)]).any(dim=0)
        a, b, fa, fb, width = a[bends], b[bends], fa[bends], fb[bends], width[bends]
        inner, f_inner = [t[bends] for t in inner], tuple(f[bends] for f in f_inner)
        if num_found + len(a) > max_kinks:
            raise TooManyKinks(f"more than {max_kinks:,} kinks on one circle")
        if len(a) == 0:
            break
        kink, is_one = _intersect(function, (a, fa, b, fb), (inner, f_inner), noise)
        narrow = ~is_one & (width < _NARROWEST)
        found += [kink[is_one], ((a + b) / 2)[narrow]]
        num_found += int((is_one | narrow).sum())
        cut = ~(is_one | narrow)
        edges_of = [a, *inner, b]
        values_of = [fa, *f_inner, fb]
        a, b = (torch.cat([t[cut] for t in part]) for part in (edges_of[:-1], edges_of[1:]))
        fa, fb = (torch.cat([f[cut] for f in part]) for part in (values_of[:-1], values_of[1:]))
    return torch.cat(found).sort().values if found else edges.new_zeros(0)


def _intersect(
    function: Callable[[Angles], Values],
    ends: tuple[Angles, Values, Angles, Values],
    inside: tuple[list[Angles], tuple[Values, ...]],
    noise: float,
) -> tuple[Angles, Tensor]:
    """The intersection of the sinusoids at both ends of each interval, and whether it is the only kink in it."""
    a, fa, b, fb = ends
    width = b - a
    after, before = a + _OUTER * width, b - _OUTER * width
    f_after, f_before = function(torch.cat([after, before])).chunk(2)
    left, right = fit_sinusoid(a, fa, after, f_after), fit_sinusoid(b, fb, before, f_before)
    same = right.move_origin(a)
    kink = a + torch.remainder(torch.atan2(same.value - left.value, left.slope - same.slope), torch.pi)

    def off(angle: Angles, value: Values) -> Tensor:
        return (torch.where(angle < kink, left(angle), right(angle)) - value).abs()

    is_one = (kink > after) & (kink < before)
    for angle, value in zip(*inside, strict=True):
        is_one &= off(angle, value) <= _EXTRAPOLATED * noise
    # As near as the noise allows: two kinks that lie closer together than that are taken for one.
    jump = (right.move_origin(kink).slope - left.move_origin(kink).slope).abs()
    near = torch.minimum(_CLEAR * _EXTRAPOLATED * noise / jump, _BESIDE * width)
    beside = torch.stack([kink - near, kink + near])
    f_beside = torch.full_like(beside, torch.inf)
    f_beside[:, is_one] = function(beside[:, is_one].flatten()).reshape(2, -1)
    for angle, value in zip(beside, f_beside, strict=True):
        is_one &= off(angle, value) <= _EXTRAPOLATED * noise
    return kink, is_one
