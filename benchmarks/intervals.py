"""Means over batches with bootstrap intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 10_000


def mean_with_interval(values: list[float], seed: int) -> str:
    """The mean, with its bootstrap interval where there are several values."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    low, high = bootstrap_interval(values, np.random.default_rng(seed))
    return f"{statistics.fmean(values):.1f} [{low:.1f}, {high:.1f}]"


def bootstrap_interval(values: Sequence[float], generator: np.random.Generator) -> tuple[float, float]:
    """The middle 95 % of the means of batches drawn again with replacement."""
    drawn = generator.integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
