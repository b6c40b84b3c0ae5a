"""Every number that a finding may hold: its name, range, words, channels, and what a gate may conclude from it.

A new metric is one line here; findings, gates, reports and the documentation read this table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unmask.channels import CHANNELS
from unmask.recovery import Aim


@dataclass(frozen=True)
class Metric:
    """A metric of the auditor, who knows the secret.

    `aim` is what an attack must have looked for before a gate on it can be held: findings of every channel with this
    aim have the metric, unless it is of one `channel` alone. `of_nothing` is its value where an attack finds nothing.
    """

    title: str
    aim: Aim
    least: float = 0.0
    largest: float = 1.0
    of_nothing: float = 0.0
    unit: str = ""  # behind a share: '93 % of tokens'
    is_whole: bool = False  # one is a leak, however it was got
    is_amount: bool = False  # says how much leaked
    is_proven: bool = False  # the protocol proves it, whatever an attack found
    channel: str | None = None
    is_mistake: bool = False  # of the attack itself: it says nothing about what leaks

    def is_of(self, channel: str) -> bool:
        """Whether findings of a channel have it."""
        return channel in CHANNELS and self.aim in CHANNELS[channel].aims and self.channel in (None, channel)

    @property
    def is_share(self) -> bool:
        """Whether it is written as a percentage."""
        return (self.least, self.largest, self.of_nothing) == (0.0, 1.0, 0.0) and not self.is_whole


def _count(title: str, aim: Aim, **options: Any) -> Metric:
    return Metric(title, aim, largest=math.inf, **options)


METRICS: Mapping[str, Metric] = {
    "exact_texts": _count("Texts recovered exactly", Aim.TEXTS, is_whole=True),
    "exact_rate": Metric("Share of texts recovered exactly", Aim.TEXTS, is_amount=True),
    "near_exact_texts": _count("Texts recovered up to a few characters", Aim.TEXTS, is_whole=True),
    "certain_texts": _count("Texts that the attack is certain of", Aim.TEXTS),
    "false_texts": _count("Texts that were claimed and are not there", Aim.TEXTS, is_mistake=True),
    "rouge1": Metric("ROUGE-1", Aim.TEXTS),
    "rouge2": Metric("ROUGE-2", Aim.TEXTS),
    "rougeL": Metric("ROUGE-L", Aim.TEXTS),
    "token_recall": Metric("Share of tokens recovered", Aim.TOKENS, unit="of tokens", is_amount=True),
    "token_precision": Metric("Share of named tokens that occur", Aim.TOKENS),
    "epsilon": Metric("Privacy budget ε", Aim.TEXTS, largest=math.inf, is_proven=True, channel="gradients"),
    "cosine": Metric("Cosine with the plain update", Aim.TEXTS, least=-1.0, is_proven=True, channel="gradients"),
    "weights_found": _count("Heads, or output layers, found", Aim.WEIGHTS, is_whole=True),
    "weights_rate": Metric("Weights recovered (1 − relative error)", Aim.WEIGHTS, unit="of weights", is_amount=True),
    "weight_error": Metric("Relative error of the weights", Aim.WEIGHTS, of_nothing=1.0),
    "hidden_size_found": Metric("Hidden size found", Aim.WEIGHTS, is_whole=True, is_amount=True),
    "hidden_size_share": Metric("Share of the hidden size that is proven", Aim.WEIGHTS, is_amount=True),
    "false_weights": _count("Weights that were claimed and are not there", Aim.WEIGHTS, is_mistake=True),
    "inputs_found": _count("Inputs of a layer found", Aim.INPUTS, is_whole=True),
    "inputs_rate": Metric("Inputs recovered (1 − relative error)", Aim.INPUTS, unit="of inputs", is_amount=True),
    "input_error": Metric("Relative error of the inputs", Aim.INPUTS, of_nothing=1.0),
    "false_inputs": _count("Inputs that were claimed and are not there", Aim.INPUTS, is_mistake=True),
}
LEAKS = tuple(name for name, metric in METRICS.items() if metric.unit)  # in words, one of them says how much leaked
AMOUNTS = tuple(name for name, metric in METRICS.items() if metric.is_amount)


def names_what_is_not_there(metrics: Mapping[str, Any]) -> bool:
    """Whether the attack named a text, weights or an input that is none; as a guess, or as certain."""
    return any(METRICS[name].is_mistake and (value or 0) > 0 for name, value in metrics.items() if name in METRICS)
