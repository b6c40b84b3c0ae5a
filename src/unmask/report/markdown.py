"""The report as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from unmask.audit.cases.case_names import full_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.gates import Ruling
from unmask.audit.findings.verdict import Verdict
from unmask.report import page
from unmask.report.case_details import is_shortened, repeat_command
from unmask.report.counterparts import Counterparts, Effect
from unmask.report.numbers import leak_in_full
from unmask.report.secrets import reason
from unmask.report.worst_leaks import worst_leaks
from unmask.safe_text import code_span, last_name, make_safe

MAX_LINES = 20  # of a table; a comment on GitHub ends at 65,536 characters
_PUNCTUATION = set("\\`*_{}[]()#|<>&~@$")
_HEADINGS = ("leaks", "not leaked by this attack", "inconclusive", "error", "not run")


def render_markdown(audit: Audit, verdict: Verdict, folder: Path) -> str:
    """Verdict, gates, numbers, and what somebody should look at first. It never holds a text."""
    face = page.hero(verdict)
    plan = page.plan_of(audit.manifest)
    title = plan.get("title") or last_name(str(plan.get("path") or "none"))
    places = {finding.id: place for place, finding in enumerate(audit.findings)}
    parts = [
        f"## unmask: {face.word}",
        f"**{_prose(verdict.headline)}**",
        f"{face.note} Plan {code_span(title, 120)}, exit code {verdict.exit_code}. Texts are never in this file.",
        *_worst(verdict),
        *_gates(verdict, places),
        *_summary(audit),
        *_look_at(audit, verdict, folder),
        *_leaks(audit, verdict),
        *_missing(audit),
    ]
    if audit.num_damaged:
        parts.append(
            f"{audit.num_damaged} damaged line(s) in the findings; the process was probably killed while it wrote."
        )
    for version, count in page.other_versions(audit):
        parts.append(f"{count} finding(s) were made by unmask {code_span(version)}, not by the manifest's version.")
    parts.append(
        "'Not leaked by this attack' and 'inconclusive' never mean 'safe'. The words are explained in "
        "`docs/reading-the-report.md`; details are in `report.html`."
    )
    return "\n\n".join(parts) + "\n"


def _worst(verdict: Verdict) -> list[str]:
    """For each channel and model how bad it is, and what this audit would do about it."""
    lines = worst_leaks(verdict)
    body = [
        [
            code_span(line.channel, 40),
            code_span(line.model, 60),
            f"**{line.severity.value}**",
            f"{line.leak} ({code_span(line.id, 40)})",
            code_span(line.advice, 240),
            code_span(line.cost, 120),
        ]
        for line in lines[:MAX_LINES]
    ]
    head = ["channel", "model", "severity", "worst leak", "recommended by this audit", "what that costs"]
    return ["### Worst leaks", _table(head, body), *_more(len(lines))] if body else []


def _gates(verdict: Verdict, places: dict[str, int]) -> list[str]:
    lines = page.gate_lines(verdict, places)
    if not lines:
        return []
    order = (Ruling.CROSSED, Ruling.INCONCLUSIVE, Ruling.HELD)
    body = [
        [code_span(line.text), f"**{line.ruling}**", *(str(line.counts[ruling.value]) for ruling in order)]
        for line in lines[:MAX_LINES]
    ]
    return ["### Gates", _table(["gate", "verdict", *(ruling.value for ruling in order)], body), *_more(len(lines))]


def _summary(audit: Audit) -> list[str]:
    lines = page.summary(audit)
    body = [
        [code_span(channel, 40), code_span(model, 60), *(str(count) for count in counts.values())]
        for channel, model, counts in lines[:MAX_LINES]
    ]
    return ["### Cases", _table(["channel", "model", *_HEADINGS], body), *_more(len(lines))] if body else []


def _look_at(audit: Audit, verdict: Verdict, folder: Path) -> list[str]:
    """Crossed gates, errors, then gates that are inconclusive."""
    crossed = {judgement.finding.id for judgement in verdict.crossed}
    unclear = {judgement.finding.id: judgement.why for judgement in verdict.inconclusive}
    ranks = {
        finding.id: 0 if finding.id in crossed else 1 if finding.outcome is Outcome.ERROR else 2
        for finding in audit.findings
        if finding.id in crossed | unclear.keys() or finding.outcome is Outcome.ERROR
    }
    if not ranks:
        return []
    stops = Counterparts(verdict)
    chosen = sorted((finding for finding in audit.findings if finding.id in ranks), key=lambda f: ranks[f.id])
    body = []
    for finding in chosen[:MAX_LINES]:
        stopped = [stop.protection for stop in stops.of(finding) if stop.effect is Effect.STOPPED]
        body.append(
            [
                finding.outcome.value,
                code_span(full_name(finding.case), 240),
                leak_in_full(finding),
                code_span(_why(finding, unclear.get(finding.id)), 480),
                code_span(stopped[0], 120) if stopped else "–",
                code_span(finding.id, 40),
            ]
        )
    table = _table(["outcome", "case", "leak", "why", "stopped by, in this audit", "id"], body)
    path = page.plan_of(audit.manifest).get("path")
    command = repeat_command(path, str(folder), chosen[0].id, show=False)
    where = " (folders are left out)" if is_shortened(path, str(folder)) else ""
    again = [f"To run the first of them again{where}: {code_span(command, 4000)}"] if command else []
    return ["### Look at these first", table, *_more(len(chosen)), *again]


def _why(finding: Finding, open_point: str | None) -> str:
    """Why a gate is open, where that is not plain from how the attack ended, and the attack's own words."""
    if open_point is None or finding.outcome in (Outcome.ERROR, Outcome.INCONCLUSIVE):
        return reason(finding)
    return f"{open_point}; {reason(finding)}"


def _leaks(audit: Audit, verdict: Verdict) -> list[str]:
    """What leaked in all cases, the most first, also where gates hold or none is set."""
    rows = [row for row in page.rows(audit, verdict) if row.outcome is not Outcome.ERROR]
    rows.sort(key=lambda row: -row.order[1])
    body = [
        [code_span(f"{row.channel} · {row.model} · {row.name}", 240), row.leak, row.gate, row.outcome.value]
        for row in rows[:MAX_LINES]
    ]
    return ["### How much leaked", _table(["case", "leak", "gate", "outcome"], body), *_more(len(rows))] if body else []


def _missing(audit: Audit) -> list[str]:
    cases = page.missing_cases(audit)
    lines = [f"- {code_span(name, 240)}, id {code_span(case_id, 40)}" for case_id, name in cases[:MAX_LINES]]
    return ["### Not run yet", "\n".join(lines), *_more(len(cases))] if cases else []


def _more(number: int) -> list[str]:
    return [f"… and {number - MAX_LINES} more, in `report.html`."] if number > MAX_LINES else []


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _prose(text: str) -> str:
    return "".join(f"\\{sign}" if sign in _PUNCTUATION else sign for sign in make_safe(text, 2000))
