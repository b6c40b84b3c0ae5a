"""Deciding between 'zero up to precision' and 'not zero' by the widest gap, not by a threshold set by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# A float32 client and float32 rows: distances below this are all 'zero', and gaps between them mean nothing.
FLOAT32_FLOOR = 1e-7


@dataclass(frozen=True)
class Gap:
    """An interval of distances in which nothing was seen: everything accepted lies below, all else above.

    `floor` is what the evidence's precision leaves of a zero.
    """

    accepted: float
    rejected: float
    floor: float = FLOAT32_FLOOR

    @property
    def threshold(self) -> float:
        """The middle of the gap on a logarithmic scale."""
        return math.sqrt(max(self.accepted, self.floor) * max(self.rejected, self.floor))

    @property
    def decades(self) -> float:
        """Width of the gap: log₁₀ of rejected over accepted."""
        return math.log10(max(self.rejected, self.floor) / max(self.accepted, self.floor))

    def narrowed(self, distances: Float[Tensor, " n"]) -> Gap:
        """The widest gap inside this one once more distances were seen.

        Distances inside the interval are ambiguous; the widest empty part of it becomes the new gap. A batch of
        distances that are all false, or all true, leaves the gap where it was.
        """
        inside = distances[(distances > self.accepted) & (distances < self.rejected)].double().cpu()
        if len(inside) == 0:
            return self
        ends = torch.tensor([self.accepted, self.rejected], dtype=torch.float64)
        values = torch.cat([inside, ends]).clamp_min(self.floor).sort().values
        logs = values.log10()
        where = int((logs[1:] - logs[:-1]).argmax())
        return Gap(float(values[where]), float(values[where + 1]), self.floor)


def widest_gap(distances: Float[Tensor, " n"], ceiling: float, floor: float = FLOAT32_FLOOR) -> Gap:
    """The widest gap between `distances` and `ceiling`, a distance that only wrong candidates reach.

    `floor` is the distance that the evidence's precision leaves of a zero; gaps below it mean nothing.
    """
    if len(distances) == 0:
        return Gap(0.0, ceiling, floor)
    return Gap(float(distances.min()), ceiling, floor).narrowed(distances)
