"""Gates: what a plan does not accept. 'no near-exact text', 'rouge2 < 0.1'. A gate speaks of one metric.

A gate is held only by an attack that looked at everything that the gate forbids (`Recovery.looked_for` is the rule) and
would have found it: the control, the same attack on the same secret without protection, must cross the gate.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from unmask.audit.findings.finding import ERROR, Finding
from unmask.errors import InputError
from unmask.metrics import METRICS, names_what_is_not_there
from unmask.recovery import Aim, Status
from unmask.wording import did_you_mean

PHRASES: Mapping[str, str] = {
    "no exact text": "exact_texts == 0",
    "no near-exact text": "near_exact_texts == 0",
    "no token": "token_recall == 0",
    "no weights": "weights_found == 0",
    "no inputs": "inputs_found == 0",
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
_NOT_LOOKED = (
    "the attack did not look at all {aim}: it did not search for them, stopped early, or could not confirm its result"
)
_MISLED = "the attack is certain of {aim} that are not there, so it did not look where the true ones are"
_NO_TEXTS = "; where it read the tokens, use a gate on tokens"
_CONCLUSIVE = frozenset(status.name for status in Status if status.conclusive)
_CHOSEN = "the plan chose this attack; only the default attack, the strongest that fits, can hold a gate"
_UNPROTECTED = (
    "this case has no protection to take away, so nothing shows that the attack could find here what the gate forbids: "
    "that it found nothing may be the attack's weakness"
)


class Ruling(Enum):
    """What a gate says of a finding."""

    HELD = "held"
    CROSSED = "crossed"
    INCONCLUSIVE = "inconclusive"  # never 'held': the attack did not end, did not look, or would not have found it


@dataclass(frozen=True)
class Gate:
    """A rule that every finding under it must keep. Its text gives it back: `parse_gate(str(gate)) == gate`."""

    text: str
    metric: str
    sign: str
    bound: float

    def concerns(self, channel: str) -> bool:
        """Whether findings of a channel have its metric."""
        return METRICS[self.metric].is_of(channel)

    def judge(self, finding: Finding) -> Ruling:
        """Crossed if the measured number breaks the rule; held only if the attack looked, and would have found it."""
        return self.explain(finding)[0]

    def explain(self, finding: Finding) -> tuple[Ruling, str]:
        """The ruling, and why, in one sentence without a full stop."""
        value = self._value_of(finding.metrics)
        if finding.status == ERROR:
            return Ruling.INCONCLUSIVE, "the case ended in an error"
        if value is None:
            return Ruling.INCONCLUSIVE, f"{self.metric} was not measured"
        if not self._is_kept_by(value):
            return Ruling.CROSSED, f"{self.metric} = {value:.3g}"
        metric = METRICS[self.metric]
        if metric.is_proven:
            return Ruling.HELD, f"{self.metric} = {value:.3g}, which no attack changes"
        if not finding.ran_to_the_end:
            return Ruling.INCONCLUSIVE, f"the attack did not apply or did not finish ({finding.status})"
        if metric.is_mistake or not self._is_kept_by(metric.of_nothing):
            return Ruling.HELD, f"{self.metric} = {value:.3g}"  # an attack that finds nothing would cross it
        return self._explain_by_control(finding)

    def _explain_by_control(self, finding: Finding) -> tuple[Ruling, str]:
        """Whether what was not found would have been: the attack looked for it, and finds it without protection."""
        if not finding.is_default_attack:
            return Ruling.INCONCLUSIVE, _CHOSEN
        aim = METRICS[self.metric].aim
        if aim.value not in finding.looked_for:
            is_misled = finding.status == Status.RECOVERED.name and names_what_is_not_there(finding.metrics)
            why = (_MISLED if is_misled else _NOT_LOOKED).format(aim=aim.value)
            return Ruling.INCONCLUSIVE, f"{why}{_NO_TEXTS}" if aim is Aim.TEXTS else why
        if finding.control is None:
            return Ruling.INCONCLUSIVE, _UNPROTECTED
        value, status = self._value_of(finding.control["metrics"]), finding.control["status"]
        if value is None or status not in _CONCLUSIVE:  # what it has right by chance shows nothing
            return Ruling.INCONCLUSIVE, f"the control (the same case without protection) ended as {status}"
        seen = f"without protection the same attack has {self.metric} = {value:.3g}"
        if self._is_kept_by(value):
            return Ruling.INCONCLUSIVE, f"{seen}, so it would not have found what the gate forbids"
        return Ruling.HELD, seen

    def _is_kept_by(self, value: float) -> bool:
        return _OPERATORS[self.sign](value, self.bound)

    def _value_of(self, metrics: Mapping[str, float]) -> float | None:
        value = metrics.get(self.metric)
        if value is None and self.metric == "epsilon":
            return math.inf  # no guarantee was given
        return None if value is None or math.isnan(value) else value

    def __str__(self) -> str:
        return self.text


def parse_gate(text: str) -> Gate:
    """The gate that a text names: one of the phrases, or a metric, a sign and a number."""
    match = _RULE.fullmatch(PHRASES.get(text.strip().lower(), text))
    known = sorted(METRICS)
    usage = (
        f"write one of {', '.join(map(repr, PHRASES))}, or a rule such as 'rouge2 < 0.1' with one of {', '.join(known)}"
    )
    if match is None or match[1] not in known:
        meant = did_you_mean(match[1], known) if match else did_you_mean(text, PHRASES)
        raise InputError(f"the gate {text!r} is not understood.{meant} Usage: {usage}")
    try:
        bound = float(match[3])
    except ValueError:
        raise InputError(f"the gate {text!r} compares with {match[3]!r}, which is no number; {usage}") from None
    least, most = METRICS[match[1]].least, METRICS[match[1]].largest
    # Values at the ends tell, but for '==', which any value between may keep.
    ends = [least, most] if match[2] != "==" else [least, most, bound]
    kept = [_OPERATORS[match[2]](value, bound) and least <= value <= most for value in ends]
    if all(kept) or not any(kept):
        which = "every value keeps" if all(kept) else "no value can keep"
        raise InputError(f"the gate {text!r} says what {which}: {match[1]} lies in {least:g}…{most:g}; {usage}")
    return Gate(text.strip(), match[1], match[2], bound)
