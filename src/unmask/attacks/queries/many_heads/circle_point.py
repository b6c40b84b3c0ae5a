"""All heads at one y from tokens of bounded norm: a circle that shows them, offsets from it, one fit of everything."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.many_heads.circle_fit import fit_circle
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.resolution import NoPlane
from unmask.linalg.least_squares import Equations, polish_equations

SPARE = 3.0  # standard deviations of what a fit may leave
_NUM_ANGLES = (240, 240, 240, 240, 480, 480, 480, 480)  # one plane after the other
_BEST_SIZE = 45.0  # of a head's score on the circle: steps of 1/45 are seen with 240 values, and poles lie close to it
_LARGEST_ERROR = 0.2  # of a score on the circle, to begin with
_SIGN = 0.1  # how far from ±1 a sign may come out
_NUM_UNSURE = 2  # planes whose heads do not add up: of a pair W, −W, or W = 0, all do so; else heads were wrong
_SCORES = (-1.5, 0.0, 1.5)  # of each head where offsets are asked
_INSIDE = 0.95  # of the longest u: leaves room for offsets
_OFFSET = 0.3  # of the longest u, at most
_NUM_TRIES = 4
_ROUNDING = 30.0  # times the arithmetic's error: an answer is a sum of several heads, and u and y have errors as well
_NUM_PILOTS = 16


@dataclass(frozen=True, eq=False)
class EvenPart:
    """What two tokens tell of heads, without what is linear in u.

        G(u, y) = F(u, y) − ½ (Σ_h v_h)ᵀu = ½ Σ_h (v_hᵀu)·tanh(uᵀW_h y/2)

    G is even in u; (v, W) and (−v, −W) have the same G, a pair W, −W is one head with v⁺ − v⁻, and W = 0 is nothing.
    Notation: F as in `Pairs`, which shares norms between u and y, so that y has norm one and |u| is up to max_norm²/4.
    """

    pairs: Pairs
    profile: OracleProfile

    def __call__(self, U: Float[Tensor, "b d"], y: Float[Tensor, "*b d"]) -> Float[Tensor, " b"]:
        """G of each row of U."""
        return self.pairs(U, y) - U @ self.pairs.sum_v / 2

    def noise(self, U: Float[Tensor, "b d"], values: Float[Tensor, " b"]) -> float:
        """The standard deviation of a value: what is added to answers, and what the arithmetic loses."""
        longest = float(U.norm(dim=1).max())
        boost = min(self.pairs.boost, self.pairs.max_norm / (2 * longest))
        size = float((values.abs() + (U @ self.pairs.sum_v).abs() / 2).max())
        return self.profile.absolute_error / boost + _ROUNDING * self.profile.precision * size

    def longest(self, generator: torch.Generator) -> float:
        """|u| at which heads show best on a circle, or the longest that may be asked at a y of norm one.

        tanh(2x)/(2·tanh x) = 1/(1 + tanh² x) tells the size of scores, from G(2u) and G(u).
        """
        width = len(self.pairs.sum_v)
        U, Y = (_unit(_NUM_PILOTS, width, generator).to(self.pairs.sum_v) for _ in range(2))
        bound = 0.999 * self.pairs.farthest(Y[0])
        step = min(math.sqrt(width), bound / 2)
        for _ in range(40):  # factors of 4: any scale is reached
            single, double = (self(factor * step * U, Y).norm() for factor in (1, 2))
            bend = float(double / (4 * single.clamp_min(1e-300)))
            if 0.6 < bend < 0.98:
                score = 2 * math.atanh(math.sqrt(max(1 / bend - 1, 1e-6))) / step
                return min(bound, _BEST_SIZE / math.sqrt(2) / score)
            if bend >= 0.98 and step >= bound / 2:
                return bound
            step = min(step * 4 if bend >= 0.98 else step / 4, bound / 2)
        raise NoPlane("no length of tokens was found at which the answers bend as attention does")


class Asked(NamedTuple):
    """Points u and the values of G there, all at one y."""

    U: Float[Tensor, "q d"]
    values: Float[Tensor, " q"]


@dataclass(frozen=True, eq=False)
class PointHeads:
    """Heads at y up to their sign: G(u, y) = ½ Σ_h (v_hᵀu)·tanh(w_hᵀu/2), w_h = W_h y; and what was asked there."""

    y: Float[Tensor, " d"]
    v: Float[Tensor, "h d"]
    w: Float[Tensor, "h d"]
    longest: float
    asked: Asked


def find_point(even: EvenPart, longest: float, generator: torch.Generator) -> PointHeads:
    """The heads at the first y and plane of u that show them all.

    Limits: raises `NoPlane` where no plane does.
    Cost: 240 queries a plane, one or two planes as a rule, and 6·H·(d − 2) for the offsets.
    """
    width, last = len(even.pairs.sum_v), "no circle of tokens shows heads that explain it"
    others = list[PointHeads]()
    for num_angles in _NUM_ANGLES:
        if len(others) == _NUM_UNSURE:
            break
        y = _unit(1, width, generator)[0].to(even.pairs.sum_v)
        frame = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q.T.to(y)
        angle = math.pi * (torch.arange(num_angles, dtype=y.dtype, device=y.device) + 0.5) / num_angles
        U = longest * torch.stack([angle.cos(), angle.sin()], dim=1) @ frame[:2]
        values = even(U, y)
        noise = even.noise(U, values)
        if float(values.abs().max()) <= 5 * noise:
            raise NoPlane("answers do not bend: no W shows at the norms that are answered")
        found = fit_circle(angle, values, noise)
        if found is None or found.condition * noise > _LARGEST_ERROR:
            continue
        try:
            heads = PointHeads(y, *_from_plane(found.heads, frame, longest), longest, Asked(U, values))
            heads = _spread(even, heads, frame)
        except NoPlane as ending:
            last = str(ending)
            continue
        if read_signs(heads.v, even.pairs.sum_v) is not None:
            return heads
        others.append(heads)
    if others:
        return min(others, key=lambda heads: len(heads.v))
    raise NoPlane(last)


def read_signs(v: Float[Tensor, "h d"], total: Float[Tensor, " d"]) -> Float[Tensor, " h"] | None:
    """The signs with which v add up to Σ_h v_h; None where none do, or several may."""
    if len(v) > len(total):
        return None
    signs = torch.linalg.lstsq(v.T, total[:, None], driver="gelsd").solution[:, 0]
    left = float((signs @ v - total).norm())
    is_clear = bool(((signs.abs() - 1).abs() < _SIGN).all()) and left <= _SIGN * float(v.norm(dim=1).min())
    return signs.sign() if is_clear else None


def _from_plane(
    heads: Float[Tensor, "4 h"], frame: Float[Tensor, "d d"], longest: float
) -> tuple[Float[Tensor, "h d"], Float[Tensor, "h d"]]:
    """v and w in the plane of the circle, zero elsewhere."""
    return heads[2:].T @ frame[:2] / longest, heads[:2].T @ frame[:2] / longest


def _spread(even: EvenPart, heads: PointHeads, frame: Float[Tensor, "d d"]) -> PointHeads:
    """v and w in all directions: along each further one, shifts and heights of all heads; then all at once.

        G(u + ε·g) with u on the circle:  t_h + ε·w_hᵀg,  v_hᵀu + ε·v_hᵀg

    Two unknowns a head for each direction g, from 6 values a head at which it is between on and off.
    """
    on_circle = _crossings(heads, frame)
    typical = float((heads.w @ frame[:2].T).norm(dim=1).median()) / math.sqrt(2)
    rows, answers, v, w = [heads.asked.U], [heads.asked.values], heads.v.clone(), heads.w.clone()
    for g in frame[2:]:
        epsilon = min(1 / typical, _OFFSET * heads.longest)
        for _ in range(_NUM_TRIES):
            at = on_circle + epsilon * g
            heard = even(at, heads.y)
            x = torch.zeros(2 * len(v), dtype=v.dtype, device=v.device)
            shifted = polish_equations(_offset_equations(heads, on_circle, heard), x)
            if shifted.deviation <= SPARE * _noise_with_start(even, at, heard):
                break
            epsilon *= -0.5
        else:
            raise NoPlane("the heads of a circle do not explain the answers beside it")
        shift, height = shifted.x.reshape(2, -1) / epsilon
        w, v = w + shift[:, None] * g, v + height[:, None] * g
        rows.append(at)
        answers.append(heard)
    U, values = torch.cat(rows), torch.cat(answers)
    start = torch.cat([v.flatten(), w.flatten()])
    whole = polish_equations(joint_equations(U, values, len(v)), start, damping=1e-6)
    if whole.deviation > SPARE * even.noise(U, values):
        raise NoPlane("no heads explain all answers at one token together")
    v, w = whole.x.reshape(2, len(v), -1)
    return replace(heads, v=v, w=w, asked=Asked(U, values))


def _noise_with_start(even: EvenPart, at: Tensor, heard: Tensor) -> float:
    """Errors of the heads on the circle come on top of those of a value; they are corrected later, all together."""
    return max(10 * even.noise(at, heard), 1e-6 * float(heard.abs().max()))


def _crossings(heads: PointHeads, frame: Tensor) -> Float[Tensor, "q d"]:
    """Points of a slightly smaller circle where each head's score is −1.5, 0 and 1.5, on both sides."""
    plane = heads.w @ frame[:2].T * (_INSIDE * heads.longest)
    size, middle = plane.norm(dim=1), torch.atan2(plane[:, 1], plane[:, 0])
    scores = torch.tensor(_SCORES, dtype=size.dtype, device=size.device)
    aside = torch.acos((scores[:, None] / size).clamp(-0.95, 0.95))
    angle = torch.cat([middle + aside, middle - aside]).flatten()
    return _INSIDE * heads.longest * torch.stack([angle.cos(), angle.sin()], dim=1) @ frame[:2]


def _offset_equations(heads: PointHeads, U: Tensor, values: Tensor) -> Equations:
    """Unknowns: one shift and one height for each head, the same at all points."""
    t, c = U @ heads.w.T, U @ heads.v.T

    def equations(x: Float[Tensor, " x"]) -> tuple[Tensor, Tensor]:
        shift, height = x.reshape(2, -1)
        share = 0.5 * torch.tanh((t + shift) / 2)
        total = c + height
        return (total * share).sum(1) - values, torch.cat([total * (0.25 - share.square()), share], dim=1)

    return equations


def joint_equations(U: Float[Tensor, "q d"], values: Float[Tensor, " q"], num_heads: int) -> Equations:
    """Unknowns: v (heads, d), then w (heads, d), flat."""

    def equations(x: Float[Tensor, " x"]) -> tuple[Tensor, Tensor]:
        v, w = x.reshape(2, num_heads, -1)
        share, c = 0.5 * torch.tanh(U @ w.T / 2), U @ v.T
        slope = c * (0.25 - share.square())
        J = torch.cat([share[:, :, None] * U[:, None], slope[:, :, None] * U[:, None]], dim=1)
        return (c * share).sum(1) - values, J.flatten(1)

    return equations


def _unit(num: int, width: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    return torch.nn.functional.normalize(torch.randn(num, width, generator=generator, dtype=torch.float64), dim=1)
