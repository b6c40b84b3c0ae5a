"""Deciding between 'zero up to precision' and 'not zero' by the widest gap, not by a threshold set by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

# A float32 client and float32 rows: distances below this are all 'zero', and gaps between them mean nothing.
FLOAT32_FLOOR = 1e-7
_NO_GAP = 0.05  # decades that would be written as 0.0


@dataclass(frozen=True)
class Gap:
    """An interval of distances in which nothing was seen: everything accepted lies below, all else above.

    `floor` is what the evidence's precision leaves of a zero; `seen` are the distances that the interval rests on.
    """

    accepted: float
    rejected: float
    floor: float = FLOAT32_FLOOR
    seen: Float[Tensor, " n"] | None = field(default=None, repr=False, compare=False)

    @property
    def threshold(self) -> float:
        """The middle of the gap on a logarithmic scale."""
        return math.sqrt(max(self.accepted, self.floor) * max(self.rejected, self.floor))

    @property
    def decades(self) -> float:
        """Width of the gap: log₁₀ of rejected over accepted."""
        return math.log10(max(self.rejected, self.floor) / max(self.accepted, self.floor))

    def describe(self) -> str:
        """How far apart accepted and refused distances lie, as the end of a sentence about distances."""
        if self.decades < _NO_GAP:
            return "are as small for what is refused as for what is accepted"
        return f"have a gap of only {self.decades:.1f} decades"

    def narrow(self, distances: Float[Tensor, " n"]) -> Gap:
        """The widest gap once more distances were seen, whatever the order in which they came.

        Distances that are all false, or all true, leave the gap where it was.
        """
        ends = torch.tensor([self.accepted, self.rejected], dtype=torch.float64)
        before = ends if self.seen is None else self.seen
        new = distances.double().cpu()
        values = torch.cat([before, new[new < before.max()]]).sort().values
        logs = values.clamp_min(self.floor).log10()
        where = int((logs[1:] - logs[:-1]).argmax())
        return Gap(float(values[where]), float(values[where + 1]), self.floor, values)


def widest_gap(distances: Float[Tensor, " n"], ceiling: float, floor: float = FLOAT32_FLOOR) -> Gap:
    """The widest gap between `distances` and `ceiling`, a distance that only wrong candidates reach.

    `floor` is the distance that the evidence's precision leaves of a zero; gaps below it mean nothing.
    """
    if len(distances) == 0:
        return Gap(0.0, ceiling, floor)
    return Gap(min(float(distances.min()), ceiling), ceiling, floor).narrow(distances)
