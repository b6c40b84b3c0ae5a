"""One turn around a circle: where a function that is a sinusoid in pieces jumps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.resolution import NoPlane, Resolution

_NUM_ARCS = 32
_START = 0.1234  # where the half turn begins; any angle will do
_MOST_OPEN = 2048  # arcs under division at once: noise leaves all of them open


def find_crossings(
    g: Callable[[Float[Tensor, " b"]], Float[Tensor, " b"]], resolution: Resolution
) -> Float[Tensor, " h"]:
    """The angles in a half turn at which g jumps, in order.

    Between jumps g(θ) = A·cos θ + B·sin θ, which two ends of an arc determine; two points inside test it. An arc that
    fails is halved, down to the resolution.

    Limits: jumps closer than the resolution are one; a jump below the tolerance is not seen, nor are two jumps in one
    arc that cancel, unless a point that is asked lies between them. Raises `NoPlane` where
    an arc stays open that is wider than a jump can be, or where more arcs stay open than heads could explain.
    Cost: about 4·log₂(0.1/resolution) queries a jump.
    Source: our own; for kinks in the place of jumps cf. Carlini et al., arXiv 2003.04884.
    """
    ends = _START + torch.linspace(0, torch.pi, _NUM_ARCS + 1, dtype=torch.float64)
    values = g(ends)
    device, scale = values.device, values.abs().max()
    ends = ends.to(device)
    left, right, g_left, g_right = ends[:-1], ends[1:], values[:-1], values[1:]
    closed = []
    while len(left):
        width = right - left
        middle, aside = left + 0.5 * width, left + 0.2763 * width
        g_middle, g_aside = g(torch.cat([middle, aside])).split(len(left))

        off = torch.maximum(
            (_sinusoid(middle, left, right, g_left, g_right) - g_middle).abs(),
            (_sinusoid(aside, left, right, g_left, g_right) - g_aside).abs(),
        )
        is_open = off > resolution.sinusoid * scale
        is_small = is_open & (width < resolution.angle)
        closed.append(torch.stack([left[is_small], right[is_small]], dim=1))
        halve = is_open & ~is_small
        if int(halve.sum()) > _MOST_OPEN:
            raise NoPlane("the answers on a circle are not sinusoids in pieces")
        left, right, g_left, g_right = (
            torch.cat([left[halve], middle[halve]]),
            torch.cat([middle[halve], right[halve]]),
            torch.cat([g_left[halve], g_middle[halve]]),
            torch.cat([g_middle[halve], g_right[halve]]),
        )
    zones = _join(torch.cat(closed), resolution.angle)
    if len(zones) and float((zones[:, 1] - zones[:, 0]).max()) > 6 * resolution.angle:
        raise NoPlane("two heads cross too close to each other, or a head changes too slowly")
    return zones.mean(1)


def _sinusoid(at: Tensor, left: Tensor, right: Tensor, g_left: Tensor, g_right: Tensor) -> Tensor:
    """A·cos θ + B·sin θ through two points."""
    return (g_left * (right - at).sin() + g_right * (at - left).sin()) / (right - left).sin()


def _join(zones: Float[Tensor, "z 2"], angle: float) -> Float[Tensor, "h 2"]:
    """Zones in order, those that touch as one."""
    joined: list[list[float]] = []
    for left, right in sorted(zones.tolist()):
        if joined and left - joined[-1][1] < 2 * angle:
            joined[-1][1] = right
        else:
            joined.append([left, right])
    return torch.tensor(joined, dtype=torch.float64, device=zones.device).reshape(-1, 2)
