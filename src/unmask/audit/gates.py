"""Gates: what a plan does not accept. 'no exact text', 'rouge2 < 0.1'. A gate speaks of one metric."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from unmask.audit.finding import ERROR, Finding
from unmask.errors import InputError

# Metrics by the channel whose findings have them.
TEXT_METRICS = (
    *("exact_texts", "exact_rate", "certain_texts", "false_texts", "rouge1", "rouge2", "rougeL"),
    *("token_recall", "token_precision", "epsilon", "cosine"),
)
METRICS: Mapping[str, tuple[str, ...]] = {
    "gradients": TEXT_METRICS,
    "outputs": tuple(name for name in TEXT_METRICS if name not in ("epsilon", "cosine")),
    "queries": (
        "weights_found",
        "weights_rate",
        "weight_error",
        "hidden_size_found",
        "hidden_size_share",
        "false_weights",
    ),
}
PHRASES: Mapping[str, str] = {
    "no exact text": "exact_texts == 0",
    "no token": "token_recall == 0",
    "no weights": "weights_found == 0",
    "no hidden size": "hidden_size_found == 0",
}
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_RULE = re.compile(r"\s*(\w+)\s*(<=|>=|==|<|>)\s*([-+.\w]+)\s*")
# Least and largest values; of all others 0 and 1.
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("exact_texts", "certain_texts", "false_texts", "epsilon"), (0.0, math.inf)),
    **dict.fromkeys(("weights_found", "false_weights"), (0.0, math.inf)),
    "cosine": (-1.0, 1.0),
}
# Metrics that the protocol proves, whatever an attack found.
PROVEN = ("epsilon", "cosine")


class Ruling(Enum):
    """What a gate says of a finding."""

    HELD = "held"
    CROSSED = "crossed"
    INCONCLUSIVE = "inconclusive"  # never 'held': the attack did not apply, did not end, or raised


@dataclass(frozen=True)
class Gate:
    """A rule that every finding under it must keep. Its text gives it back: `parse_gate(str(gate)) == gate`."""

    text: str
    metric: str
    sign: str
    bound: float

    def concerns(self, channel: str) -> bool:
        """Whether findings of a channel have its metric."""
        return self.metric in METRICS.get(channel, ())

    def judge(self, finding: Finding) -> Ruling:
        """Crossed if the measured number breaks the rule; held only by an attack that ran to its end."""
        value = finding.metrics.get(self.metric)
        if value is None and self.metric == "epsilon":
            value = math.inf  # no guarantee was given
        if finding.status == ERROR or value is None or math.isnan(value):
            return Ruling.INCONCLUSIVE
        if not _OPERATORS[self.sign](value, self.bound):
            return Ruling.CROSSED
        return Ruling.HELD if finding.ran_to_the_end or self.metric in PROVEN else Ruling.INCONCLUSIVE

    def __str__(self) -> str:
        return self.text


def parse_gate(text: str) -> Gate:
    """The gate that a text names: one of the phrases, or a metric, a sign and a number."""
    match = _RULE.fullmatch(PHRASES.get(text.strip().lower(), text))
    known = sorted({name for names in METRICS.values() for name in names})
    usage = f"write one of {', '.join(map(repr, PHRASES))}, or a rule as 'rouge2 < 0.1' with one of {', '.join(known)}"
    if match is None or match[1] not in known:
        raise InputError(f"the gate {text!r} is not understood; {usage}")
    try:
        bound = float(match[3])
    except ValueError:
        raise InputError(f"the gate {text!r} compares with {match[3]!r}, which is no number; {usage}") from None
    least, most = _RANGES.get(match[1], (0.0, 1.0))
    # Values at the ends tell, but for '==', which any value between may keep.
    ends = [least, most] if match[2] != "==" else [least, most, bound]
    kept = [_OPERATORS[match[2]](value, bound) and least <= value <= most for value in ends]
    if all(kept) or not any(kept):
        which = "every value keeps" if all(kept) else "no value can keep"
        raise InputError(f"the gate {text!r} says what {which}: {match[1]} lies in {least:g}…{most:g}; {usage}")
    return Gate(text.strip(), match[1], match[2], bound)
