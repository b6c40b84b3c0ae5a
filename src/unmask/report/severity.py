"""How bad a leak is, in one word and one sentence."""

from __future__ import annotations

from enum import Enum

from unmask.audit.findings.finding import Finding, Outcome
from unmask.metrics import LEAKS
from unmask.recovery import Status
from unmask.report.numbers import number

_MOST = 0.5  # of the words, or of the weights


class Severity(Enum):
    """How bad it is, the worst first. The value is what people read; `meaning` says what was measured."""

    CRITICAL = "critical"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    UNKNOWN = "not known"
    NONE = "nothing found"

    @property
    def meaning(self) -> str:
        """What was measured."""
        return _MEANINGS[self]

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


_MEANINGS = {
    Severity.CRITICAL: "Whole texts, weights or inputs were read, and the attacker can prove that they are right.",
    Severity.HIGH: "Whole texts, weights or inputs were read, but the attacker cannot prove that they are right.",
    Severity.MEDIUM: "At least half of the words, weights or inputs were read.",
    Severity.LOW: "Some words were read, or something about the weights.",
    Severity.UNKNOWN: "The attack failed, did not apply or did not finish. Nothing is known.",
    Severity.NONE: "This attack found nothing. Another one may.",
}


def severity_of(finding: Finding) -> Severity:
    """How bad a finding is, by what was measured; of a live federation by what is claimed."""
    if finding.outcome in (Outcome.ERROR, Outcome.INCONCLUSIVE):
        return Severity.UNKNOWN
    if finding.outcome is Outcome.NO_LEAK:
        return Severity.NONE
    if not finding.metrics:
        proven = any(pair.certain for pair in finding.texts)
        return Severity.CRITICAL if proven else Severity.HIGH if finding.texts else Severity.MEDIUM
    if _has(finding, "weights_found") or _has(finding, "inputs_found"):
        return Severity.CRITICAL if Status[finding.status].conclusive else Severity.HIGH
    if _has(finding, "near_exact_texts") or _has(finding, "exact_texts"):
        return Severity.CRITICAL if _has(finding, "certain_texts") else Severity.HIGH
    share = max((number(finding.metrics, name) or 0.0 for name in LEAKS), default=0.0)
    return Severity.MEDIUM if share >= _MOST else Severity.LOW


def _has(finding: Finding, name: str) -> bool:
    return (number(finding.metrics, name) or 0.0) > 0
