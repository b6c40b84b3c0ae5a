"""Every number that a finding may hold: its name, range, words, channels, and what a gate may conclude from it.

A new metric is one line here; findings, gates, reports and the documentation read this table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unmask.recovery import Aim

_TEXTS, _WEIGHTS = frozenset({"gradients", "outputs"}), frozenset({"queries"})
_UPDATES = frozenset({"gradients"})


@dataclass(frozen=True)
class Metric:
    """A metric of the auditor, who knows the secret.

    `aim` is what an attack must have looked for before a gate on it can be held. `of_nothing` is its value for an
    attack that finds nothing.
    """

    title: str
    channels: frozenset[str]
    aim: Aim
    least: float = 0.0
    largest: float = 1.0
    of_nothing: float = 0.0
    unit: str = ""  # behind a share: '93 % of tokens'
    is_whole: bool = False  # one is a leak, however it was got
    is_amount: bool = False  # says how much leaked
    is_proven: bool = False  # the protocol proves it, whatever an attack found
    is_mistake: bool = False  # of the attack itself: it says nothing about what leaks

    @property
    def is_share(self) -> bool:
        """Whether it is written as a percentage."""
        return (self.least, self.largest, self.of_nothing) == (0.0, 1.0, 0.0) and not self.is_whole


def _count(title: str, channels: frozenset[str], aim: Aim, **options: Any) -> Metric:
    return Metric(title, channels, aim, largest=math.inf, **options)


METRICS: Mapping[str, Metric] = {
    "exact_texts": _count("Texts recovered exactly", _TEXTS, Aim.TEXTS, is_whole=True),
    "exact_rate": Metric("Share of texts recovered exactly", _TEXTS, Aim.TEXTS, is_amount=True),
    "near_exact_texts": _count("Texts recovered up to a few characters", _TEXTS, Aim.TEXTS, is_whole=True),
    "certain_texts": _count("Texts that the attack is certain of", _TEXTS, Aim.TEXTS),
    "false_texts": _count("Texts that were claimed and are not there", _TEXTS, Aim.TEXTS, is_mistake=True),
    "rouge1": Metric("ROUGE-1", _TEXTS, Aim.TEXTS),
    "rouge2": Metric("ROUGE-2", _TEXTS, Aim.TEXTS),
    "rougeL": Metric("ROUGE-L", _TEXTS, Aim.TEXTS),
    "token_recall": Metric("Share of tokens recovered", _TEXTS, Aim.TOKENS, unit="of tokens", is_amount=True),
    "token_precision": Metric("Share of named tokens that occur", _TEXTS, Aim.TOKENS),
    "epsilon": Metric("Privacy budget ε", _UPDATES, Aim.TEXTS, largest=math.inf, is_proven=True),
    "cosine": Metric("Cosine with the plain update", _UPDATES, Aim.TEXTS, least=-1.0, is_proven=True),
    "weights_found": _count("Heads, or output layers, found", _WEIGHTS, Aim.WEIGHTS, is_whole=True),
    "weights_rate": Metric(
        "Weights recovered (1 − relative error)", _WEIGHTS, Aim.WEIGHTS, unit="of weights", is_amount=True
    ),
    "weight_error": Metric("Relative error of the weights", _WEIGHTS, Aim.WEIGHTS, of_nothing=1.0),
    "hidden_size_found": Metric("Hidden size found", _WEIGHTS, Aim.WEIGHTS, is_whole=True, is_amount=True),
    "hidden_size_share": Metric("Share of the hidden size that is proven", _WEIGHTS, Aim.WEIGHTS, is_amount=True),
    "false_weights": _count("Weights that were claimed and are not there", _WEIGHTS, Aim.WEIGHTS, is_mistake=True),
}
LEAKS = tuple(name for name, metric in METRICS.items() if metric.unit)  # in words, one of them says how much leaked
AMOUNTS = tuple(name for name, metric in METRICS.items() if metric.is_amount)


def metrics_of(channel: str) -> list[str]:
    """Names of the metrics that findings of a channel may have."""
    return [name for name, metric in METRICS.items() if channel in metric.channels]
