"""Numbers of findings: the one that says how much leaked, how numbers are written, and intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unmask.audit.findings.finding import Finding, Outcome, TextPair
from unmask.metrics import LEAKS, METRICS
from unmask.recovery import Aim, AmbiguityKind
from unmask.safe_text import make_safe
from unmask.wording import count_noun

CONFIDENCE = 0.95
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a finding; None where it is absent or could not be written."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:  # JSON knows whole numbers that no float holds
        return None
    return value if math.isfinite(value) else None


def leak(finding: Finding) -> tuple[str, float] | None:
    """The metric that says how much leaked, with its value; None where the auditor does not know the secret."""
    for name in LEAKS:
        value = number(finding.metrics, name)
        if value is not None:
            return name, value
    return None


def leak_in_words(finding: Finding) -> str:
    """How much leaked, as '93 % of tokens'. Nothing is never said of an attack that is inconclusive."""
    measured = leak(finding)
    if finding.outcome is Outcome.INCONCLUSIVE and not (measured and measured[1]):
        return "inconclusive"
    if finding.outcome is Outcome.LEAK and not finding.metrics:
        claims = ((len(finding.texts), "text"), (len(finding.tokens), "token"))
        return f"{' and '.join(count_noun(*claim) for claim in claims if claim[0]) or 'something'} claimed"
    if measured is None:
        return "not measured"
    name, value = measured
    chance = number(finding.chance, name)
    beside = finding.outcome is Outcome.NO_LEAK and value > 0 and chance is not None
    usual = f" (chance {percent(chance)})" if beside and chance is not None else ""
    return f"{percent(value)} {METRICS[name].unit}{usual or _surer_than_chance(finding)}"


def _surer_than_chance(finding: Finding) -> str:
    """Why no more tokens than chance gives are a leak: fewer of those that are named are false."""
    names = ("token_recall", "token_precision")
    recall, precision = (number(finding.metrics, name) for name in names)
    usual, guessed = (number(finding.chance, name) for name in names)
    if finding.outcome is not Outcome.LEAK or recall is None or precision is None or usual is None or guessed is None:
        return ""
    told = f" (chance {percent(usual)}), but {percent(precision)} of those named occur (chance {percent(guessed)})"
    return told if recall <= usual and precision > guessed else ""


def leak_in_full(finding: Finding) -> str:
    """The same; of a leak also the number of exact texts, even where it is none, of near-exact ones and of those with

    alternatives, and the hidden size.
    """
    if finding.outcome is not Outcome.LEAK:
        return leak_in_words(finding)
    words = [leak_in_words(finding), *_texts_in_words(finding.metrics)]
    if num_open := sum(_has_alternatives(pair) for pair in finding.texts):
        words.append(f"{num_open} known except for alternatives")
    if number(finding.metrics, "hidden_size_found"):
        words.append("hidden size found")
    elif share := number(finding.metrics, "hidden_size_share"):
        words.append(f"{percent(share)} of the hidden size as a lower bound")
    return ", ".join(words)


def _texts_in_words(metrics: Mapping[str, Any]) -> list[str]:
    exact, near = number(metrics, "exact_texts"), number(metrics, "near_exact_texts")
    if exact is None:
        return []
    return [f"{exact:.0f} exact"] + ([f"{near:.0f} near-exact"] if near is not None and near > exact else [])


def _has_alternatives(pair: TextPair) -> bool:
    """Whether the text stands for several; how often it occurs is not its content."""
    return any(point.kind != AmbiguityKind.COUNT.value for point in pair.ambiguities)


def looked_for_in_words(finding: Finding) -> str:
    """What the attack tried to find; empty where that is not known."""
    if Aim.TEXTS.value in finding.looked_for:
        return "tokens and whole texts."
    if Aim.TOKENS.value in finding.looked_for:
        return "tokens only. The attack did not test their order, so it says nothing about texts."
    others = (aim for aim in (Aim.WEIGHTS, Aim.INPUTS) if aim.value in finding.looked_for)
    return next((f"{aim.value}." for aim in others), "")


def control_in_words(finding: Finding) -> str:
    """What the same attack found without protection; empty where nothing protects the case."""
    if finding.control is None:
        return ""
    metrics = finding.control["metrics"]
    shares = [
        f"{percent(value)} {METRICS[name].unit}" for name in LEAKS if (value := number(metrics, name)) is not None
    ]
    found = ", ".join([*shares, *_texts_in_words(metrics)]) or "nothing measured"
    return f"without protection the same attack ended as {make_safe(finding.control['status'], 40)}: {found}."


def percent(share: float) -> str:
    """A share from 0 to 1; only what is all is written 100 %, only what is nothing 0 %."""
    if 0 < share < 0.005:
        return "< 1 %"
    if 0.995 <= share < 1:
        return "> 99 %"
    return f"{100 * share:.0f} %"


def format_value(name: str, value: Any) -> str:
    """A metric's value for people."""
    if value is None:
        return "∞" if name == "epsilon" else "not a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return make_safe(value)
    known = number({name: value}, name)
    if known is None:
        return "not a number"
    return percent(known) if name in METRICS and METRICS[name].is_share else scientific(known)


def scientific(value: float) -> str:
    """Three digits, powers of ten for very small and very large numbers."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "∞" if value > 0 else "–∞" if value < 0 else "not a number"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval for the mean of shares over seeds, cut at 0 and 1; None with fewer than two seeds."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(len(values))
    return max(0.0, mean - half), min(1.0, mean + half)
