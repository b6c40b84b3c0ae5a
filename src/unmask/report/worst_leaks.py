"""The worst leak of each channel and model, and the protection that this audit would recommend against it.

A protection is a protocol, a sum over clients, or defences. A cell is a case without its protection. With the cells
that leak under some protection or none, a protection

    stops     if it was tried on at least one of them, and the attack found nothing on any that it was tried on
    is best   if it stops on the most cells; of equals, if it leaves the highest cosine with the plain update

Limits: only default attacks count, a baseline proves nothing; what was inconclusive stops nothing. The cosine is known
for updates alone: what a protection costs elsewhere is not measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from unmask.audit.cases.case_names import full_name, is_live, model_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.channels import threat_key, threat_of
from unmask.report.counterparts import cell_of, is_protected, protection_name
from unmask.report.numbers import leak, leak_in_full, number, scientific
from unmask.report.severity import Severity, severity_of
from unmask.safe_text import make_safe
from unmask.wording import count_noun

_KNOWN = (Outcome.LEAK, Outcome.NO_LEAK)


@dataclass(frozen=True)
class WorstLeak:
    """What a privacy officer reads of a channel and model; sentences have no full stop."""

    channel: str
    model: str
    severity: Severity
    place: int  # of the finding among all
    id: str
    case: str
    leak: str
    advice: str
    cost: str


def worst_leaks(findings: Sequence[Finding]) -> list[WorstLeak]:
    """One line for each channel and model, the worst first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, finding in enumerate(findings):
        groups[make_safe(finding.case.get("channel", "?"), 40), model_name(finding.case)].append(place)
    lines = [_line(*names, places, findings) for names, places in groups.items()]
    return sorted(lines, key=lambda line: (line.severity.rank, line.channel, line.model))


def _line(channel: str, model: str, places: Sequence[int], findings: Sequence[Finding]) -> WorstLeak:
    place = min(places, key=lambda one: _order(findings[one]))
    worst = findings[place]
    advice, cost = _advise(worst, [findings[one] for one in places])
    return WorstLeak(
        channel,
        model,
        severity_of(worst),
        place,
        make_safe(worst.id),
        full_name(worst.case),
        leak_in_full(worst),
        advice,
        cost,
    )


def _order(finding: Finding) -> tuple[int, float, bool]:
    """The worst first; of equals the one that more leaked from, then the one without protection."""
    return severity_of(finding).rank, -(leak(finding) or ("", 0.0))[1], is_protected(finding.case)


def _advise(worst: Finding, findings: Sequence[Finding]) -> tuple[str, str]:
    """What to do about a leak, and what that costs."""
    if worst.outcome is not Outcome.LEAK:
        return "–", "–"
    if is_live(worst.case):
        return "nothing was compared: a live federation shows one way of sending updates", "–"
    leaking, tried = _tried(findings)
    if not tried:
        return "no protection was tried on the cases that leak", "–"
    stopped = {name: ones for name, ones in tried.items() if all(one.outcome is Outcome.NO_LEAK for one in ones)}
    if stopped:
        name = max(stopped, key=lambda one: (len(stopped[one]), _cosine(stopped[one]) or -1.0))
        cases = f"{len(stopped[name])} of {count_noun(leaking, 'case')} that {'leaks' if leaking == 1 else 'leak'}"
        return f"{name}: not leaked by this attack in {cases}", _cost(stopped[name])
    known = {name: ones for name, ones in tried.items() if all(one.outcome in _KNOWN for one in ones)}
    num_open = len(tried) - len(known)
    told = f"{len(tried)} tried{f', {num_open} inconclusive' if num_open else ''}"
    none = f"no protection was shown to stop the leak ({told})"
    if not known:
        return f"{none}; how much still leaks is not known", "–"
    name = max(known, key=lambda one: min(map(_order, known[one])))
    left = min(known[name], key=_order)
    if _order(left)[:2] <= _order(worst)[:2]:
        return f"{none}; with each of them as much leaked as without", "–"
    return f"{none}; least leaked with {name}: {severity_of(left).value}, {leak_in_full(left)}", _cost(known[name])


def _tried(findings: Sequence[Finding]) -> tuple[int, dict[str, list[Finding]]]:
    """How many cells leak, and the findings of each protection that was tried on them."""
    counted = [finding for finding in findings if finding.is_default_attack]
    leaking = {cell_of(finding.case) for finding in counted if finding.outcome is Outcome.LEAK}
    tried: dict[str, list[Finding]] = defaultdict(list)
    for finding in counted:
        if is_protected(finding.case) and cell_of(finding.case) in leaking:
            tried[protection_name(finding.case)].append(finding)
    return len(leaking), tried


def _cosine(findings: Sequence[Finding]) -> float | None:
    """What is left of the update's direction, on average; None where that is not measured."""
    values = [value for finding in findings if (value := number(finding.metrics, "cosine")) is not None]
    return sum(values) / len(values) if values else None


def _cost(findings: Sequence[Finding]) -> str:
    """What a protection costs, as far as the audit tells."""
    cosine, page = _cosine(findings), threat_of(threat_key(findings[0].case)).page
    if cosine is None:
        return f"not measured in an audit; see {page}"
    budgets = [value for finding in findings if (value := number(finding.metrics, "epsilon")) is not None]
    private = f", ε = {scientific(max(budgets))}" if budgets else ""
    return f"cosine {cosine:.2f} with the update as it was (1: no cost){private}"
