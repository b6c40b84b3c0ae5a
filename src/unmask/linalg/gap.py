"""Deciding between 'zero up to precision' and 'not zero' by the widest gap, not by a threshold set by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# Rows are computed in float32, so distances below this are all 'zero' and gaps between them mean nothing.
_PRECISION = 1e-7


@dataclass(frozen=True)
class Gap:
    """An interval of distances in which nothing was seen: everything accepted lies below, all else above."""

    accepted: float
    rejected: float

    @property
    def threshold(self) -> float:
        """The middle of the gap on a logarithmic scale."""
        return math.sqrt(max(self.accepted, _PRECISION) * max(self.rejected, _PRECISION))

    @property
    def decades(self) -> float:
        """Width of the gap: log₁₀ of rejected over accepted."""
        return math.log10(max(self.rejected, _PRECISION) / max(self.accepted, _PRECISION))

    def narrowed(self, distances: Float[Tensor, " n"]) -> Gap:
        """The widest gap inside this one once more distances were seen.

        Distances inside the interval are ambiguous; the widest empty part of it becomes the new gap. A batch of
        distances that are all false, or all true, leaves the gap where it was.
        """
        inside = distances[(distances > self.accepted) & (distances < self.rejected)].double().cpu()
        if len(inside) == 0:
            return self
        ends = torch.tensor([self.accepted, self.rejected], dtype=torch.float64)
        values = torch.cat([inside, ends]).clamp_min(_PRECISION).sort().values
        logs = values.log10()
        where = int((logs[1:] - logs[:-1]).argmax())
        return Gap(float(values[where]), float(values[where + 1]))


def widest_gap(distances: Float[Tensor, " n"], ceiling: float) -> Gap:
    """The widest gap between `distances` and `ceiling`, a distance that only wrong candidates reach."""
    if len(distances) == 0:
        return Gap(0.0, ceiling)
    return Gap(float(distances.min()), ceiling).narrowed(distances)
