"""What the page says before any script runs: verdict, summary, rows of the table, manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unmask.audit.cases.case_names import case_name, full_name, model_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.gates import Ruling
from unmask.audit.findings.verdict import CROSSED, FAILED, INCONCLUSIVE, Judgement, Verdict
from unmask.metrics import METRICS
from unmask.report.numbers import leak, leak_in_full
from unmask.report.secrets import reason
from unmask.safe_text import command_without_folders, make_safe, value_without_folders
from unmask.wording import count_noun

MAX_NAMED = 50  # findings that are named beside a gate; the table has all of them
NO_GATE = "no gate"
_MOST_URGENT_FIRST = (Outcome.LEAK, Outcome.ERROR, Outcome.INCONCLUSIVE, Outcome.NO_LEAK)


@dataclass(frozen=True)
class Named:
    """A finding to point to, and why it is pointed to, where that needs a sentence."""

    place: int
    name: str
    id: str
    why: str = ""


@dataclass(frozen=True)
class GateLine:
    """A gate with what it says of all its findings."""

    text: str
    ruling: str  # the worst one
    counts: Mapping[str, int]
    named: tuple[Named, ...]
    num_more: int


@dataclass(frozen=True)
class Hero:
    """The verdict in a word, a colour and a sentence."""

    kind: str
    word: str
    note: str


@dataclass(frozen=True)
class Row:
    """A line of the table of findings; `order` has a number for each column that is not sorted by its words."""

    place: int
    outcome: Outcome
    channel: str
    model: str
    name: str
    leak: str
    gate: str
    id: str
    order: tuple[float, float, float]


def hero(verdict: Verdict) -> Hero:
    """The verdict's face. Green only where gates were set and held and no case is inconclusive."""
    match verdict.exit_code:
        case code if code == CROSSED:
            return Hero("crossed", "Gate crossed", "At least one case breaks a rule of the plan.")
        case code if code == FAILED:
            return Hero("error", "Incomplete", "Some cases ended in an error. Nothing is known about them.")
        case code if code == INCONCLUSIVE:
            return Hero("unclear", "Inconclusive", "It is not known whether the gates hold.")
    if not verdict.judgements:
        note = "The plan sets no gate, so nothing can fail. Read the findings below."
        return Hero("neutral", "No gate set", note)
    note = _why_held([METRICS[judgement.gate.metric].is_proven for judgement in verdict.judgements])
    if unknown := verdict.outcomes.get(Outcome.INCONCLUSIVE):
        cases = f"{count_noun(unknown, 'case')} {'is' if unknown == 1 else 'are'}"
        return Hero("neutral", "No gate crossed", f"{note} {cases} inconclusive.")
    return Hero("held", "No gate crossed", note)


def _why_held(of_the_protocol: Sequence[bool]) -> str:
    if all(of_the_protocol):
        return (
            "Every gate of the plan is about the protocol's own numbers, and they meet it. What attacks found is below."
        )
    if any(of_the_protocol):
        return f"Gates on ε or cosine hold by the protocol's own numbers, the others against these attacks. {_WORTH}"
    return f"Every gate of the plan held against these attacks. {_WORTH}"


_WORTH = "Without protection, these attacks find what the gates forbid. Other attacks were not tried."


def gate_lines(verdict: Verdict, places: Mapping[str, int]) -> list[GateLine]:
    """Gates, the crossed ones first, with the findings that crossed them or left them open."""
    by_gate: dict[str, list[Judgement]] = {}
    for judgement in verdict.judgements:
        by_gate.setdefault(judgement.gate.text, []).append(judgement)
    lines = []
    for text, judgements in by_gate.items():
        counts = Counter(judgement.ruling for judgement in judgements)
        worst = next(ruling for ruling in _WORST_FIRST if counts[ruling])
        named = [
            Named(
                places[judgement.finding.id],
                full_name(judgement.finding.case),
                make_safe(judgement.finding.id),
                make_safe(judgement.why) if worst is Ruling.INCONCLUSIVE else "",
            )
            for judgement in judgements
            if judgement.ruling is worst and worst is not Ruling.HELD
        ]
        numbers = {ruling.value: counts[ruling] for ruling in _WORST_FIRST}
        more = len(named) - len(named[:MAX_NAMED])
        lines.append(GateLine(make_safe(text), worst.value, numbers, tuple(named[:MAX_NAMED]), more))
    order = [ruling.value for ruling in _WORST_FIRST]
    return sorted(lines, key=lambda line: order.index(line.ruling))


_WORST_FIRST = (Ruling.CROSSED, Ruling.INCONCLUSIVE, Ruling.HELD)


def worst_ruling(judgements: Sequence[Judgement]) -> str:
    """The worst word of the gates on one finding."""
    rulings = {judgement.ruling for judgement in judgements}
    return next((ruling.value for ruling in _WORST_FIRST if ruling in rulings), NO_GATE)


def judgements_by_finding(verdict: Verdict) -> dict[str, list[Judgement]]:
    """What the gates say, by the finding's id; findings under no gate are not in it."""
    judgements: dict[str, list[Judgement]] = {}
    for judgement in verdict.judgements:
        judgements.setdefault(judgement.finding.id, []).append(judgement)
    return judgements


def plan_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Path, hash and title of the plan; empty where none made the findings (a live federation)."""
    plan = manifest.get("plan")
    return plan if isinstance(plan, Mapping) else {}


def rows(audit: Audit, verdict: Verdict) -> list[Row]:
    """All findings, in the order of the plan."""
    judgements = judgements_by_finding(verdict)
    return [_row(place, finding, judgements.get(finding.id, [])) for place, finding in enumerate(audit.findings)]


def _row(place: int, finding: Finding, judgements: Sequence[Judgement]) -> Row:
    measured, gate = leak(finding), worst_ruling(judgements)
    channel, name = make_safe(finding.case.get("channel", "?"), 40), case_name(finding.case)
    severity = _MOST_URGENT_FIRST.index(finding.outcome)
    gates = [*(ruling.value for ruling in _WORST_FIRST), NO_GATE].index(gate)
    is_known = measured is not None and finding.outcome in (Outcome.LEAK, Outcome.NO_LEAK)
    order = (float(severity), measured[1] if measured and is_known else -1.0, float(gates))
    return Row(
        place,
        finding.outcome,
        channel,
        model_name(finding.case),
        name,
        leak_in_full(finding),
        gate,
        make_safe(finding.id),
        order,
    )


def summary(audit: Audit) -> list[tuple[str, str, dict[str, int]]]:
    """Numbers by channel and model: outcomes, and planned cases that were not run."""
    table: dict[tuple[str, str], Counter[str]] = {}
    for finding in audit.findings:
        table.setdefault(_cell(finding.case), Counter())[finding.outcome.name] += 1
    missing = set(audit.missing)
    for case in audit.planned:
        if case["id"] in missing:
            table.setdefault(_cell(case.get("case") or {}), Counter())["MISSING"] += 1
    columns = (*(outcome.name for outcome in Outcome), "MISSING")
    return [(*cell, {column: counts[column] for column in columns}) for cell, counts in sorted(table.items())]


def _cell(case: Mapping[str, Any]) -> tuple[str, str]:
    return make_safe(case.get("channel", "?"), 40), model_name(case)


def missing_cases(audit: Audit) -> list[tuple[str, str]]:
    """Id and name of every planned case without a finding."""
    cases = {case["id"]: case.get("case") or {} for case in audit.planned}
    return [(make_safe(case_id), full_name(cases[case_id])) for case_id in audit.missing]


def failed_cases(audit: Audit) -> list[tuple[Named, str]]:
    """Cases that raised, with the error."""
    return [
        (Named(place, full_name(finding.case), make_safe(finding.id)), reason(finding))
        for place, finding in enumerate(audit.findings)
        if finding.outcome is Outcome.ERROR
    ]


def other_versions(audit: Audit) -> list[tuple[str, int]]:
    """Versions of unmask that made findings and are not the manifest's, with the number of findings."""
    own = audit.manifest.get("unmask")
    versions = Counter(make_safe(finding.run["unmask"], 40) for finding in audit.findings if "unmask" in finding.run)
    return sorted((version, count) for version, count in versions.items() if own is not None and version != own)


def manifest_tables(manifest: Mapping[str, Any], show: bool) -> list[tuple[str, list[tuple[str, str]]]]:
    """The manifest without its cases, as tables of pairs. Unless secrets are shown, without what names data or people:

    hashes of data (a short text can be guessed from its hash), the host, and folders.
    """
    plain = {key: value for key, value in manifest.items() if not isinstance(value, (Mapping, list))}
    tables = [("Run", _flat(plain, show))]
    for key, value in manifest.items():
        if isinstance(value, Mapping) and value:
            pairs = _flat(value, show)
            if key == "data" and not show:
                pairs = [(name, text) for name, text in pairs if not name.endswith("sha256")]
            tables.append((make_safe(key).capitalize(), pairs))
    return tables


def _flat(value: Mapping[str, Any], show: bool, prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, part in value.items():
        name = f"{prefix}{make_safe(key if show else value_without_folders(str(key)), 120)}"
        if isinstance(part, Mapping):
            pairs += _flat(part, show, f"{name} / ")
        elif show:
            pairs.append((name, make_safe(part, 1000)))
        elif key != "host":
            cut = command_without_folders if key == "command" else value_without_folders
            pairs.append((name, make_safe(cut(str(part)), 1000)))
    return pairs
