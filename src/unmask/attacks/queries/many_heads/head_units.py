"""Heads that answer together: at any y a unit has one direction w, and its answer depends on u through uᵀw and v.

A head by itself is a unit. Heads whose W are positive multiples of one another never part: they are one unit too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.queries.pairs import logit

_WIDEST = 80.0  # scores beyond this are 0 or 1 in float64
_NUM_HALVINGS = 90  # of an interval of twice this width, down to the last digit


@dataclass(frozen=True, eq=False)
class Units:
    """Units with up to m heads each: v of every head, and its slope relative to its unit's w; absent heads have v = 0.

    r_k(u, t) = Σ_i (v_kiᵀu)·σ(λ_ki·t),    t = uᵀw_k
    """

    v: Float[Tensor, "k m d"]
    slopes: Float[Tensor, "k m"]

    @classmethod
    def single(cls, v: Float[Tensor, "k d"]) -> Units:
        """One head a unit."""
        return cls(v[:, None], torch.ones_like(v[:, :1]))

    def __len__(self) -> int:
        """The number of units."""
        return len(self.v)

    @property
    def total(self) -> Float[Tensor, "k d"]:
        """Σ_i v_ki: what a unit adds when all its heads are on."""
        return self.v.sum(1)

    @property
    def has_clusters(self) -> bool:
        """Whether some unit holds more than one head."""
        return self.v.shape[1] > 1

    def num_heads(self, unit: int) -> int:
        """The number of heads of one unit."""
        return int((self.v[unit].norm(dim=1) > 0).sum())

    def with_members(self, unit: int, v: Float[Tensor, "m d"], slopes: Float[Tensor, " m"]) -> Units:
        """The same units, one of them with these heads."""
        size = max(self.v.shape[1], len(v))
        all_v = self.v.new_zeros(len(self), size, self.v.shape[2])
        all_slopes = self.slopes.new_ones(len(self), size)
        all_v[:, : self.v.shape[1]], all_slopes[:, : self.v.shape[1]] = self.v, self.slopes
        all_v[unit], all_slopes[unit] = 0, 1
        all_v[unit, : len(v)], all_slopes[unit, : len(v)] = v, slopes
        return Units(all_v, all_slopes)

    def answers(self, U: Float[Tensor, "b d"], scores: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """r_k(u, t_k) of every unit, for each row."""
        amounts = torch.einsum("kmd,bd->bkm", self.v, U)
        return (amounts * (self.slopes * scores[:, :, None]).sigmoid()).sum(2)

    def scores(self, F: Float[Tensor, " b"], U: Float[Tensor, "b d"], unit: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
        """t of one unit from its answer when all others are off; not finite where the answer is out of its range."""
        if not self.has_clusters:
            return logit(F / (U * self.v[unit, 0]).sum(1))
        amounts, slopes = torch.einsum("bmd,bd->bm", self.v[unit], U), self.slopes[unit]

        def excess(t: Tensor) -> Tensor:
            return (amounts * (slopes * t[:, None]).sigmoid()).sum(1) - F

        # Amounts have one sign at the points that are asked, so answers grow or fall with t.
        low, high = torch.full_like(F, -_WIDEST), torch.full_like(F, _WIDEST)
        rising = amounts.sum(1).sign()
        for _ in range(_NUM_HALVINGS):
            middle = 0.5 * (low + high)
            above = rising * excess(middle) > 0
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        t = 0.5 * (low + high)
        return torch.where(t.abs() < 0.9 * _WIDEST, t, torch.nan)

    def leverage(self, across: Float[Tensor, "d d"], unit: int) -> Float[Tensor, " d"]:
        """A direction, seen through the projector `across`, in which all heads of a unit gain by their own size."""
        seen = self.v[unit] @ across
        return torch.linalg.pinv(seen, rtol=1e-9) @ self.v[unit].norm(dim=1)
