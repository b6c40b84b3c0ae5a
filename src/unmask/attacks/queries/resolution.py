"""How finely heads can be told apart: every threshold of the multi-head learner, from the oracle's own precision."""

from __future__ import annotations

import math
from dataclasses import dataclass


class NoPlane(Exception):  # noqa: N818 (an ending, not an error)
    """This random plane, or this point, does not show the heads apart; another one may."""


@dataclass(frozen=True)
class Resolution:
    """Thresholds that follow from ε, the relative error of an answer.

    Constants were chosen on random layers of 1 to 32 heads in float64 and float32 (benchmarks/run.py queries); what
    they let through is caught by predictions at fresh points, and in the end by the certificate.
    """

    precision: float
    least_angle: float = 1e-8

    @property
    def saturation(self) -> float:
        """A score beyond which a head's share is 0 or 1 to the last digit, with as much again to spare."""
        return -1.6 * math.log(self.precision)

    @property
    def lowest_score(self) -> float:
        """The most negative score that is still read: its share must stand out from ε."""
        return 0.38 * math.log(self.precision)

    @property
    def angle(self) -> float:
        """Crossings on a circle are located to this angle."""
        return max(self.least_angle, 300 * self.precision)

    @property
    def sinusoid(self) -> float:
        """Deviation from a sinusoid, relative to the largest answer, that precision explains."""
        return max(1e-12, 200 * self.precision)

    @property
    def step(self) -> float:
        """Steps of difference quotients in a region, relative to the distance to its border."""
        return max(1e-3, 50 * math.sqrt(self.precision))

    @property
    def prediction(self) -> float:
        """Relative error of a prediction with which the heads at one y count as known."""
        return 1e4 * self.precision

    @property
    def rank(self) -> float:
        """Singular values of unit columns below this count as zero."""
        return max(1e-7, 1e4 * self.precision)

    @property
    def spare_columns(self) -> int:
        """Columns beyond the rank that show it: as many columns as the rank may be nearly dependent by chance.

        The smallest singular value of r such columns falls below a share τ of the largest with probability about 2rτ.
        """
        return 1 if self.rank < 1e-6 else 3
