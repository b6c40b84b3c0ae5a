"""One unit of heads at a time: points at which all others are off, and what is read around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.queries.many_heads.head_units import Units
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.resolution import NoPlane, Resolution

CLUSTER_LOSS = 1e4  # in digits, by a further head of a cluster (10³ a head in benchmarks/run.py queries repetition)
_CENTRE = -1.5  # the score that is read best when an answer is v·u·σ(t) with an error relative to v·u
_BEYOND = 1.1  # of the saturation: how far off the other units are
_LEVERAGE = 0.7  # of |v||u|: what v·u is at least, where the width allows it
_HIGHEST = 6.0  # scores above this are too close to one
_WORST_DUAL = 1e9  # |dual|·|w| beyond which units are not told apart by their directions
_DUAL_ROUNDING = 1e-4  # of dual·w = 1: the worst dual loses nine of sixteen digits


@dataclass(frozen=True, eq=False)
class Isolation:
    """Points and probes for every unit at one y, from its directions w_k = W_k y.

        base_k: uᵀw_k = −1.5,  uᵀw_g = −1.1·saturation for g ≠ k,  v_kᵀu large

    Notation: dual_g the rows of the pseudo-inverse, dual_gᵀw_k = δ_gk. Probes of unit k are a basis of the vectors
    that leave all other scores alone, and −dual_g, which turns g further off.
    Limits: needs linearly independent w, so no more units than the width.
    """

    units: Units
    w: Float[Tensor, "k d"]
    dual: Float[Tensor, "k d"]
    bases: Float[Tensor, "k d"]
    probes: Float[Tensor, "k d d"]
    resolution: Resolution

    @classmethod
    def at(cls, units: Units, w: Float[Tensor, "k d"], resolution: Resolution) -> Isolation:
        """The points for directions that are known to a few digits."""
        dual = torch.linalg.pinv(w).T
        # Of dependent directions the pseudo-inverse is small, but their duals meet them with less than one.
        is_told = (dual.norm(dim=1) * w.norm(dim=1) < _WORST_DUAL) & (((dual * w).sum(1) - 1).abs() < _DUAL_ROUNDING)
        if not bool(is_told.all()):
            raise NoPlane("the directions of two heads are too close to turn one off without the other")
        across = torch.eye(w.shape[1], dtype=w.dtype, device=w.device) - dual.T @ w
        bases, probes = torch.zeros_like(w), across.repeat(len(w), 1, 1)
        for k in range(len(w)):
            bases[k], probes[k] = _base(units, k, dual, across, resolution), _probes(w, dual, k)
        return cls(units, w, dual, bases, probes, resolution)

    def columns(
        self,
        pairs: Pairs,
        y: Float[Tensor, "j d"],
        spans: Sequence[Float[Tensor, "d r"] | None] | None = None,
    ) -> Float[Tensor, "j k d"]:
        """W_k y for every y near the one of these points; of a unit whose span is known, only what lies in it.

        Cost: width queries a y and unit, or the dimension of its span; one or a few more to find the middle.
        """
        spans = [None] * len(self.w) if spans is None else spans
        rows = [self.probes[k] if span is None else span.T for k, span in enumerate(spans)]
        unit = torch.cat([torch.full((len(Q),), k, device=y.device) for k, Q in enumerate(rows)])
        moves = torch.cat([self._moves(Q, k, spans[k] is None) for k, Q in enumerate(rows)])
        Q = torch.cat(rows)

        slopes, start, columns = self._slopes(pairs, y, Q, unit, moves), 0, []
        for k, own in enumerate(rows):
            read = slopes[:, start : start + len(own)]
            columns.append(torch.linalg.solve(own, read.T).T if spans[k] is None else read @ own)
            start += len(own)
        return torch.stack(columns, dim=1)

    def _slopes(
        self,
        pairs: Pairs,
        y: Float[Tensor, "j d"],
        Q: Float[Tensor, "q d"],
        unit: Int[Tensor, " q"],
        moves: Float[Tensor, " q"],
    ) -> Float[Tensor, "j q"]:
        """qᵀW y of each probe's unit, at every y; what comes back saturated is asked again."""
        at, which = _grid(len(y), len(self.w), y)
        centres, t_centre = self._centre(pairs, y[at], which)
        centres, t_centre = centres.reshape(len(y), len(self.w), -1), t_centre.reshape(len(y), len(self.w))

        place, probe = _grid(len(y), len(Q), y)
        move, slopes = moves[probe], torch.full((len(place),), torch.nan, dtype=y.dtype, device=y.device)
        todo = _range_like(len(place), y)
        for _ in range(7):
            j, q = place[todo], probe[todo]
            U = centres[j, unit[q]] + move[todo, None] * Q[q]
            t = self.units.scores(pairs(U, y[j]), U, unit[q])
            good = (t > self.resolution.lowest_score) & (t < _HIGHEST)
            slopes[todo[good]] = ((t - t_centre[j, unit[q]]) / move[todo])[good]
            todo = todo[~good]
            if len(todo) == 0:
                return slopes.reshape(len(y), -1)
            move[todo] /= -3  # smaller, and the other way
        raise NoPlane("a head stays saturated whatever the step")

    def misprediction(
        self, pairs: Pairs, y: Float[Tensor, "j d"], w: Float[Tensor, "j k d"], generator: torch.Generator, num: int = 2
    ) -> Float[Tensor, " j"]:
        """The largest relative error of predictions at random points where all heads are in between, for every y."""
        num_y, num_units, width = w.shape
        dual = torch.linalg.pinv(w).transpose(1, 2)
        scores = 4 * torch.rand(num_y, num, num_units, generator=generator, dtype=torch.float64).to(y.device) - 2
        U = scores @ dual
        aside = torch.randn(num_y, num, width, generator=generator, dtype=torch.float64).to(y.device)
        aside = aside - (aside @ w.transpose(1, 2)) @ dual
        size = aside.norm(dim=2, keepdim=True).clamp_min(1e-12)
        U = U + aside * (U.norm(dim=2, keepdim=True) / size) * (size > 1e-6 * width**0.5)
        flat = U.reshape(-1, width)
        shares = self.units.answers(flat, (U @ w.transpose(1, 2)).reshape(-1, num_units))
        off = (pairs(flat, y.repeat_interleave(num, 0)) - shares.sum(1)).abs() / shares.abs().sum(1)
        return off.reshape(num_y, num).max(1).values

    @property
    def allowed(self) -> float:
        """The misprediction that precision explains.

        It grows where some heads are much larger than others, and the heads of a cluster are known to fewer digits.
        """
        spread = float(self.dual.norm(dim=1).max() * self.w.norm(dim=1).max())
        return spread * self.resolution.prediction * CLUSTER_LOSS ** (self.units.v.shape[1] - 1)

    def reach(self) -> float:
        """How far y may move in a random direction before other units are no longer off: a third of their margin."""
        size = float(self.bases.norm(dim=1).max() * self.w.norm(dim=1).max())
        return min(1.0, 0.12 * self.resolution.saturation * self.w.shape[1] ** 0.5 / size)

    def _moves(self, Q: Float[Tensor, "m d"], k: int, is_full: bool) -> Float[Tensor, " m"]:
        """Lengths of probes: scores change by about 1.5, as far as w is known."""
        size, length = self.w[k].norm(), Q.norm(dim=1)
        freedom = Q.shape[1] if is_full else len(Q)
        moves = torch.minimum(freedom**0.5 / (size * length), 1.5 / (Q @ self.w[k]).abs().clamp_min(1e-300))
        if is_full and len(self.w) > 1:
            moves[1 - len(self.w) :] = moves[1 - len(self.w) :].clamp(max=10)  # these turn other units further off
        return moves

    def _centre(
        self, pairs: Pairs, y: Float[Tensor, "b d"], unit: Int[Tensor, " b"]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, " b"]]:
        """Points on the line base + λ·dual, one for each row, where the unit's score is readable; and the score."""
        base, dual = self.bases[unit], self.dual[unit]
        shift, stride = (torch.zeros(len(y), dtype=y.dtype, device=y.device) for _ in range(2))
        stride += 4
        low, high = torch.full_like(shift, -torch.inf), torch.full_like(shift, torch.inf)
        score = torch.full_like(shift, torch.nan)
        todo = _range_like(len(y), y)
        for _ in range(30):
            U = base[todo] + shift[todo, None] * dual[todo]
            F = pairs(U, y[todo])
            t = self.units.scores(F, U, unit[todo])
            # An answer out of range says only on which side it is: below the smallest share, or above the largest.
            share = F / (U * self.units.total[unit[todo]]).sum(1)
            good = (t > 0.5 * self.resolution.lowest_score) & (t < 1)
            score[todo[good]] = t[good]
            above = torch.where(t.isfinite(), t > _CENTRE, share > 0.5)
            high[todo] = torch.where(above, shift[todo], high[todo])
            low[todo] = torch.where(above, low[todo], shift[todo])
            blind = torch.where(above, shift[todo] - stride[todo], shift[todo] + stride[todo])
            step = torch.where(t.isfinite(), shift[todo] + _CENTRE - t, blind)
            between = (step > low[todo]) & (step < high[todo])
            bracketed = low[todo].isfinite() & high[todo].isfinite()
            middle = (low[todo] + high[todo]) / 2
            shift[todo] = torch.where(good, shift[todo], torch.where(between | ~bracketed, step, middle))
            stride[todo] *= 2
            todo = todo[~good]
            if len(todo) == 0:
                return base + shift[:, None] * dual, score
        raise NoPlane("a head's score cannot be brought into range")


def _grid(num_first: int, num_second: int, like: Tensor) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """All pairs of two counts, the second running faster."""
    return _range_like(num_first, like).repeat_interleave(num_second), _range_like(num_second, like).repeat(num_first)


def _range_like(num: int, like: Tensor) -> Int[Tensor, " b"]:
    return torch.arange(num, device=like.device)


def _base(
    units: Units, k: int, dual: Float[Tensor, "k d"], across: Float[Tensor, "d d"], resolution: Resolution
) -> Float[Tensor, " d"]:
    """The point of unit k, moved where no score changes until all its heads have leverage."""
    scores = torch.full_like(dual[:, 0], -_BEYOND * resolution.saturation)
    scores[k] = _CENTRE
    u = scores @ dual
    present = units.v[k].norm(dim=1) > 0
    if not bool(present.any()):
        return u  # answers so small that no direction of them is left
    size = units.v[k, present].norm(dim=1)
    if float((units.v[k, present] @ across).norm(dim=1).min()) <= 1e-6 * float(size.max()):
        return u
    gains = units.v[k, present] @ u / size
    sign = 1.0 if float(gains.sum()) >= 0 else -1.0
    missing = _LEVERAGE * float(u.norm()) - float((sign * gains).min())
    if missing <= 0:
        return u
    aside = units.leverage(across, k)
    return u + sign * min(missing, 3 * float(u.norm() / aside.norm())) * aside


def _probes(w: Float[Tensor, "k d"], dual: Float[Tensor, "k d"], k: int) -> Float[Tensor, "d d"]:
    """A basis of the directions that leave all other units alone, then those that turn one further off."""
    others = torch.arange(len(w), device=w.device) != k
    Q = torch.linalg.qr(w[others].T, mode="complete").Q
    return torch.cat([Q[:, int(others.sum()) :].T, -dual[others]])
