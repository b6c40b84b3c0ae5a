"""A first look at all heads for one y: far out every head is on or off, and a circle crosses each one's border once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.sweep import find_crossings
from unmask.attacks.queries.pairs import Pairs, logit
from unmask.attacks.queries.resolution import NoPlane, Resolution

_SETTLED = 1e-3  # change of an answer over a fourfold distance below which heads count as on or off
_FARTHEST = 1e9  # where heads that have not turned count as heads with W = 0
_WIDEST_ANGLE = 5e-3  # beyond this, crossings of a few heads are too close more often than not
_WITHIN = 0.9  # of the largest distance: gradients are read with steps to all sides
_INDEPENDENT = 1e-3  # of the largest singular value; jumps are known to some five digits
_READABLE = 0.97  # a share above this is too close to one for a slope
_SPAN = 1.5  # scores on both sides of a crossing from which its slope is read; near the best, 1.54


@dataclass(frozen=True, eq=False)
class FirstLook:
    """v and W·y of every unit of heads, to a few digits, such that F(u, y) = eᵀu + Σ_h (v_hᵀu)·σ(uᵀW_h y).

    `linear` is e. It is None, for 0, if all signs of W could be told; otherwise a head (W, v) may stand here as
    (−W, −v) with v in e, which sequences of two tokens cannot tell apart.
    """

    v: Float[Tensor, "h d"]
    w: Float[Tensor, "h d"]
    linear: Float[Tensor, " d"] | None


@dataclass(frozen=True, eq=False)
class _Plane:
    """The circle u(θ) = a·cos θ + b·sin θ with the crossings on it and the gradient of F in every region."""

    axes: Float[Tensor, "2 d"]
    angles: Float[Tensor, " h"]
    room: Float[Tensor, " h+1"]  # half the width of every region
    gradients: Float[Tensor, "h+1 d"]

    def u(self, angles: Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        return torch.stack([angles.cos(), angles.sin()], dim=1) @ self.axes

    @property
    def jumps(self) -> Float[Tensor, "h d"]:
        return self.gradients.diff(dim=0)


def first_look(pairs: Pairs, y: Float[Tensor, " d"], resolution: Resolution, generator: torch.Generator) -> FirstLook:
    """The heads at one y, from a circle through a random plane.

        F(S·u)/S → Σ_h (v_hᵀu)·[uᵀW_h y > 0],    S → ∞

    is linear in every region. Its gradient jumps by ±v_h where the circle crosses uᵀW_h y = 0; where it crosses, the
    head alone changes, so its slope and then W_h y are read there while all others are on or off.

    Notation: u(θ) the circle, θ_h the crossings; region h lies after crossing h; S the distance.
    Limits: heads whose W y are parallel cross together and appear as one unit. Raises `NoPlane` where crossings lie
    closer than the resolution; another plane may do.
    Cost: (2·heads + 1)·width + about 130 queries a head.
    Source: our own; the paper leaves several heads open (arXiv 2601.16873, §7).
    """
    width = len(y)
    if width == 1:
        raise NoPlane("tokens of one entry span no plane")
    axes = torch.linalg.qr(torch.randn(width, 2, generator=generator, dtype=torch.float64)).Q.T.to(y.device)
    settled = _far(pairs, y, generator)
    distance = min(settled * resolution.saturation / resolution.angle / 4, _WITHIN * pairs.farthest(y))
    # Where tokens may not be that long, this angle is a hope: `find_crossings` sees when a head takes more to turn.
    resolution = replace(resolution, least_angle=settled * resolution.saturation / distance / 8)
    if resolution.angle > _WIDEST_ANGLE:
        raise NoPlane("tokens may not be as long as it takes to turn heads on and off one by one")

    def on_circle(angles: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        angles = angles.to(y.device)
        return pairs(distance * torch.stack([angles.cos(), angles.sin()], dim=1) @ axes, y) / distance

    angles = find_crossings(on_circle, resolution)
    if len(angles) == 0:
        nothing = y.new_zeros(0, width)
        return FirstLook(nothing, nothing, pairs.total_v / 2)
    plane = _regions(pairs, y, axes, angles, distance, resolution)
    sign, linear = _orientation(plane)
    plane, slopes = _slopes(pairs, y, plane, distance, resolution)
    return FirstLook(sign * plane.jumps, sign * _directions(pairs, y, plane, slopes, resolution), linear)


def _far(pairs: Pairs, y: Float[Tensor, " d"], generator: torch.Generator) -> float:
    """A distance at which answers along two random directions have settled, within a factor of sixteen.

    Near by, F(u) = Σ_h v_hᵀu/2 is odd; far out it is not, since other heads are on at −u.
    """
    U = torch.randn(2, len(y), generator=generator, dtype=torch.float64).to(y.device)
    U = torch.cat([U, -U]) / U.norm(dim=1).repeat(2)[:, None]

    def answers(distance: float) -> Float[Tensor, " 4"]:
        return pairs(distance * U, y) / distance

    def is_settled(here: Float[Tensor, " 4"], there: Float[Tensor, " 4"]) -> bool:
        is_odd = float((there[:2] + there[2:]).abs().max()) < _SETTLED * float((there[:2] - there[2:]).abs().max())
        return not is_odd and float((here - there).abs().max()) < _SETTLED * float(there.abs().max())

    distance, here, there = 1.0, answers(1.0), answers(4.0)
    if not is_settled(here, there):
        while distance < _FARTHEST and not is_settled(here, there):
            distance, here, there = 4 * distance, there, answers(16 * distance)
        return 16 * distance
    while distance > 1 / _FARTHEST and is_settled(here, there):
        distance, here, there = distance / 4, answers(distance / 4), here
    return 16 * distance


def _difference_quotients(
    pairs: Pairs, y: Float[Tensor, " d"], points: Float[Tensor, "k d"], steps: Float[Tensor, " k"]
) -> Float[Tensor, "k d"]:
    """The gradient of F at each point, where F is linear up to that step."""
    width = len(y)
    moved = points[:, None] + steps[:, None, None] * torch.eye(width, dtype=y.dtype, device=y.device)
    answers = pairs(torch.cat([moved, points[:, None]], dim=1).reshape(-1, width), y).reshape(-1, width + 1)
    return (answers[:, :-1] - answers[:, -1:]) / steps[:, None]


def _regions(
    pairs: Pairs,
    y: Float[Tensor, " d"],
    axes: Float[Tensor, "2 d"],
    angles: Float[Tensor, " h"],
    distance: float,
    resolution: Resolution,
) -> _Plane:
    """Gradients of all regions. The last is opposite to the first, where exactly the other heads are on."""
    edges = torch.cat([angles[-1:] - torch.pi, angles, angles[:1] + torch.pi])
    room = (edges.diff() / 2).clamp(max=0.5)
    if float(room.min()) < 20 * resolution.angle:
        raise NoPlane("two heads cross too close to each other")
    plane = _Plane(axes, angles, room, axes.new_zeros(0, len(y)))
    middles = ((edges[:-1] + edges[1:]) / 2)[:-1]
    steps = distance * room[:-1] * resolution.step
    gradients = _difference_quotients(pairs, y, distance * plane.u(middles), steps)
    return _Plane(axes, angles, room, torch.cat([gradients, (pairs.total_v - gradients[0])[None]]))


def _orientation(plane: _Plane) -> tuple[Float[Tensor, "h 1"], Float[Tensor, " d"] | None]:
    """The sign of every jump, and what is linear besides.

    The first gradient is the sum of v over heads that are on: L₀ = −Σ_h b_h·J_h with b in {0, 1}. Where it is not, a
    head with W = 0 or a pair of heads with opposite W is there; then all jumps are taken as they come. So they are
    where jumps depend on one another: if the v of some heads sum to 0, these may all be on or all be off.
    """
    sizes = torch.linalg.svdvals(plane.jumps / plane.jumps.norm(dim=1, keepdim=True).clamp_min(1e-300))
    share = -plane.gradients[0] @ torch.linalg.pinv(plane.jumps)
    is_on_before = share.round()
    left = plane.gradients[0] + is_on_before @ plane.jumps
    is_told = (
        len(plane.jumps) <= plane.jumps.shape[1]
        and float(sizes.min()) > _INDEPENDENT * float(sizes.max())
        and bool(((is_on_before == 0) | (is_on_before == 1)).all())
        and float((share - is_on_before).abs().max()) < 0.2
    )
    if is_told and float(left.norm()) < 1e-2 * float(plane.jumps.norm(dim=1).max()):
        return 1 - 2 * is_on_before[:, None], None
    return torch.ones_like(share)[:, None], plane.gradients[0]


def _slopes(
    pairs: Pairs, y: Float[Tensor, " d"], plane: _Plane, distance: float, resolution: Resolution
) -> tuple[_Plane, Float[Tensor, " h"]]:
    """dt_h/dθ at distance one, at every crossing, and the crossings to more digits."""
    angles = plane.angles.clone()
    below, jumps = plane.gradients[:-1], plane.jumps

    def share(at: Float[Tensor, " b"], far: Float[Tensor, " b"], which: Tensor) -> Float[Tensor, " b"]:
        U = far[:, None] * plane.u(at)
        return (pairs(U, y) - (below[which] * U).sum(1)) / (jumps[which] * U).sum(1)

    every = torch.arange(len(angles), device=y.device)
    room = torch.minimum(plane.room[:-1], plane.room[1:])
    aside = (1e-3 * room).clamp_min(4 * resolution.angle)
    far = torch.full_like(angles, distance)
    shares = share(angles + aside, far, every)
    for _ in range(80):
        close = every[shares >= _READABLE]
        if len(close) == 0:
            break
        far[close] /= 4
        shares[close] = share(angles[close] + aside[close], far[close], close)
    slopes = logit(shares.clamp(0.02, 0.98)).clamp_min(0.5) / (far * aside.sin())
    for _ in range(6):
        aside = _SPAN / (slopes * far)
        both = torch.cat([angles + aside, angles - aside])
        after, before = logit(share(both, far.repeat(2), every.repeat(2)).clamp(1e-4, 1 - 1e-4)).split(len(every))
        if float((after - before).min()) < 0.2:
            raise NoPlane("a head does not change where it should")
        slopes = (after - before) / (2 * far * aside.sin())
        angles = angles - (after + before) / 2 / (far * slopes)
        if float(torch.maximum((after - _SPAN).abs(), (before + _SPAN).abs()).max()) < 0.1:
            break
    return _Plane(plane.axes, angles, plane.room, plane.gradients), slopes


def _directions(
    pairs: Pairs, y: Float[Tensor, " d"], plane: _Plane, slopes: Float[Tensor, " h"], resolution: Resolution
) -> Float[Tensor, "h d"]:
    """±W_h y: the score of each head around its own crossing, so far out that all others are on or off."""
    num_heads, width = len(slopes), len(y)
    apart = (plane.angles[:, None] - plane.angles[None, :]).sin().abs()
    other_slopes = (slopes * apart).fill_diagonal_(torch.inf)
    nearest = other_slopes.min(1).values
    far = torch.where(nearest.isinf(), 10 / slopes, torch.maximum(1.8 * resolution.saturation / nearest, 1 / slopes))
    others = slopes.expand(num_heads, -1).clone().fill_diagonal_(0).max(1).values
    moves = torch.minimum(1 / slopes, 0.1 * resolution.saturation / others)
    centres = far[:, None] * plane.u(plane.angles)
    head = torch.arange(num_heads, device=y.device).repeat_interleave(width)
    entry = torch.arange(width, device=y.device).repeat(num_heads)

    def scores(U: Float[Tensor, "b d"], which: Tensor) -> Float[Tensor, " b"]:
        below, jumps = plane.gradients[:-1][which], plane.jumps[which]
        return logit((pairs(U, y) - (below * U).sum(1)) / (jumps * U).sum(1))

    at_centre = scores(centres, torch.arange(num_heads, device=y.device))
    if not bool((at_centre.abs() < 4).all()):
        raise NoPlane("a head is not where its crossing says")
    move = moves[head]
    found = torch.full_like(move, torch.nan)
    return _until_readable(
        lambda todo: scores(
            centres[head[todo]] + move[todo, None] * torch.eye(width, dtype=y.dtype, device=y.device)[entry[todo]],
            head[todo],
        ),
        lambda t: t.abs() < 5,
        lambda todo, t: (t - at_centre[head[todo]]) / move[todo],
        move,
        found,
        shrink=1 / 3,
    ).reshape(num_heads, width)


def _until_readable(
    ask: Callable[[Tensor], Tensor],
    is_readable: Callable[[Tensor], Tensor],
    result: Callable[[Tensor, Tensor], Tensor],
    move: Float[Tensor, " b"],
    found: Float[Tensor, " b"],
    shrink: float,
) -> Float[Tensor, " b"]:
    """Ask again, with smaller moves, what came back saturated."""
    todo = torch.arange(len(move), device=move.device)
    for _ in range(10):
        t = ask(todo)
        good = is_readable(t)
        found[todo[good]] = result(todo[good], t[good])
        todo = todo[~good]
        if len(todo) == 0:
            return found
        move[todo] *= shrink
    raise NoPlane("a head stays saturated whatever the step")
