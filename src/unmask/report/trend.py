"""Several audits of one plan in the order of time: how many cases leak in each, by channel and model.

Only cases that every audit has run are counted, so that a line does not move because cases came or went. A case that
raised or is inconclusive counts as not known, never as one that does not leak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unmask.audit.cases.case_names import model_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.report.comparison import name_without_folders
from unmask.report.severity import Severity, severity_of
from unmask.safe_text import make_safe

_KNOWN = (Outcome.LEAK, Outcome.NO_LEAK)


@dataclass(frozen=True)
class TrendPoint:
    """One audit: cases that leak, cases that are not known, and the worst severity."""

    num_leaks: int
    num_unknown: int
    severity: Severity


@dataclass(frozen=True)
class TrendLine:
    """A channel and model over all audits."""

    channel: str
    model: str
    num_cases: int
    points: tuple[TrendPoint, ...]


def trend_of(audits: Sequence[Audit]) -> list[TrendLine]:
    """A line for each channel and model that all audits have cases of."""
    sides = [_by_name(audit) for audit in audits]
    shared = [name for name in sides[0] if all(name in side for side in sides)]
    groups: dict[tuple[str, str], list[str]] = {}
    for name in shared:
        case = sides[-1][name].case
        groups.setdefault((make_safe(case.get("channel", "?"), 40), model_name(case)), []).append(name)
    return [
        TrendLine(channel, model, len(names), tuple(_point([side[name] for name in names]) for side in sides))
        for (channel, model), names in sorted(groups.items())
    ]


def _by_name(audit: Audit) -> Mapping[str, Finding]:
    """Findings by what their case says without folders; names that several share are left out."""
    names = [name_without_folders(finding.case) for finding in audit.findings]
    counts = Counter(names)
    return {name: finding for name, finding in zip(names, audit.findings, strict=True) if counts[name] == 1}


def _point(findings: Sequence[Finding]) -> TrendPoint:
    return TrendPoint(
        sum(finding.outcome is Outcome.LEAK for finding in findings),
        sum(finding.outcome not in _KNOWN for finding in findings),
        min((severity_of(finding) for finding in findings), key=lambda one: one.rank),
    )
