"""The worst leak of each channel and model, and the protection that this audit would recommend against it.

A protection is a protocol, a sum over clients, or defences. A cell is a case without its protection. With the cells
that leak under some protection or none, a protection

    stops     if it was tried on at least one of them, and on any that it was tried on the attack looked to its end
              and found nothing, and no gate is crossed or inconclusive
    is best   if it stops on the most cells; of equals, if it leaves the highest cosine with the plain update

How much leaks without a protection is that case of the plan, else the control. Controls of the plan, whose evidence
holds no signal, are no protections.

Limits: only default attacks count, a baseline proves nothing; what was inconclusive stops nothing. The cosine is known
for updates alone: what a protection costs elsewhere is not measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from unmask.audit.cases.case_names import full_name, is_live, model_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.gates import Ruling
from unmask.audit.findings.verdict import Verdict
from unmask.channels import threat_key, threat_of
from unmask.report.counterparts import (
    cell_of,
    crossed_gates,
    is_protected,
    protection_name,
    unclear_findings,
    without_controls,
)
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


def worst_leaks(verdict: Verdict) -> list[WorstLeak]:
    """One line for each channel and model, the worst first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, finding in enumerate(verdict.findings):
        groups[make_safe(finding.case.get("channel", "?"), 40), model_name(finding.case)].append(place)
    counted = {finding.id for finding in without_controls(verdict) if finding.is_default_attack}
    lines = [_line(*names, places, verdict, counted) for names, places in groups.items()]
    return sorted(lines, key=lambda line: (line.severity.rank, line.channel, line.model))


def _line(channel: str, model: str, places: Sequence[int], verdict: Verdict, counted: Collection[str]) -> WorstLeak:
    findings = verdict.findings
    place = min(places, key=lambda one: _order(findings[one]))
    worst = findings[place]
    leaking = {findings[one].id for one in places if findings[one].outcome is Outcome.LEAK}
    held = {judgement.finding.id for judgement in verdict.judgements if judgement.ruling is Ruling.HELD}
    held -= {judgement.finding.id for judgement in verdict.judgements if judgement.ruling is not Ruling.HELD}
    compared = [findings[one] for one in places if findings[one].id in counted]
    advice, cost = _advise(worst, compared, leaking <= held, crossed_gates(verdict), unclear_findings(verdict))
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


def _advise(
    worst: Finding,
    findings: Sequence[Finding],
    gates_hold: bool,
    crossed: Mapping[str, Sequence[str]],
    unclear: Collection[str],
) -> tuple[str, str]:
    """What to do about a leak, and what that costs; `gates_hold` where everything that leaks crosses no gate."""
    if worst.outcome is not Outcome.LEAK:
        return "–", "–"
    if is_live(worst.case):
        return "nothing was compared: a live federation shows one way of sending updates", "–"
    leaking, tried = _tried(findings)
    if not tried:
        return "no protection was tried on the cases that leak", "–"
    quiet = {name: ones for name, ones in tried.items() if all(one.outcome is Outcome.NO_LEAK for one in ones)}
    gates = {name: sorted({gate for one in ones for gate in crossed.get(one.id, ())}) for name, ones in quiet.items()}
    gates = {name: each for name, each in gates.items() if each}
    open_ones = {name for name, ones in tried.items() if any(one.id in unclear for one in ones)}
    stopped = {name: ones for name, ones in quiet.items() if name not in gates and name not in open_ones}
    if stopped:
        name = max(stopped, key=lambda one: (len(stopped[one]), _cosine(stopped[one]) or -1.0))
        cases = f"{len(stopped[name])} of {count_noun(leaking, 'case')} that {'leaks' if leaking == 1 else 'leak'}"
        return f"{name}: not leaked by this attack in {cases}", _cost(stopped[name])
    none = f"no protection was shown to stop {'it' if gates_hold else 'the leak'} ({_count(tried, open_ones)})"
    none = f"what leaks crosses no gate, and {none}" if gates_hold else none
    if gates:
        said = (f"{name} crosses {' and '.join(map(repr, each))}" for name, each in gates.items())
        return f"{none}; {', '.join(said)}", "–"
    known = {
        name: ones
        for name, ones in tried.items()
        if name not in open_ones and all(one.outcome in _KNOWN for one in ones)
    }
    if not known:
        return f"{none}; how much still leaks is not known", "–"
    name = max(known, key=lambda one: min(map(_order, known[one])))
    left = min(known[name], key=_order)
    bare = min(_without_protection(known[name], findings), key=_order, default=None)
    if bare is not None and (_order(left)[:2] <= _order(bare)[:2] or _in_words(left) == _in_words(bare)):
        which = "each of them" if len(known) == len(tried) else "the others"
        return f"{none}; with {which} as much leaked as without", "–"
    return f"{none}; least leaked with {name}: {_in_words(left)}", _cost(known[name])


def _in_words(finding: Finding) -> str:
    return f"{severity_of(finding).value}, {leak_in_full(finding)}"


def _tried(findings: Sequence[Finding]) -> tuple[int, dict[str, list[Finding]]]:
    """How many cells leak, and the findings of each protection that was tried on them."""
    leaking = {cell_of(finding.case) for finding in findings if finding.outcome is Outcome.LEAK}
    tried: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if is_protected(finding.case) and cell_of(finding.case) in leaking:
            tried[protection_name(finding.case)].append(finding)
    return len(leaking), tried


def _count(tried: Mapping[str, Sequence[Finding]], open_ones: Collection[str]) -> str:
    """How many protections were tried, of how many that is not known to have helped, and why."""
    ends = {name: {one.outcome for one in ones} for name, ones in tried.items()}
    unknown = sum(Outcome.INCONCLUSIVE in each or name in open_ones for name, each in ends.items())
    failed = sum(Outcome.ERROR in each for each in ends.values())
    counts = ((unknown, "inconclusive"), (failed, "ended in an error"))
    return ", ".join([f"{len(tried)} tried", *(f"{number} {word}" for number, word in counts if number)])


def _without_protection(protected: Sequence[Finding], findings: Sequence[Finding]) -> list[Finding]:
    """The same cases without protection: of the plan, else the controls; empty where neither is known."""
    cells = {cell_of(finding.case) for finding in protected}
    planned = [one for one in findings if not is_protected(one.case) and cell_of(one.case) in cells]
    return [one for one in planned if one.outcome in _KNOWN] or [
        control for finding in protected for control in _control_of(finding) if control.outcome in _KNOWN
    ]


def _control_of(finding: Finding) -> list[Finding]:
    """What the same attack gave without protection, as a finding; none where nothing protects."""
    if finding.control is None:
        return []
    said = {name: finding.control[name] for name in ("id", "case", "status", "reason", "metrics")}
    return [replace(finding, **said, texts=(), tokens=(), control=None)]


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
    private = f"; ε = {scientific(max(budgets))}" if budgets else ""
    kept = 100 * max(cosine, 0.0) ** 2  # of the squared length of what is sent
    share = f"{kept:.0f} %" if kept >= 1 else "less than 1 %"
    left = "next to no cost" if kept > 99 else f"{share} of what is sent is the update, the rest is distortion"
    return f"cosine {cosine:.2f} with the true update: {left}{private}; see docs/defences.md"
