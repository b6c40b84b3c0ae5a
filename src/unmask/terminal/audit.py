"""An audit while it runs, and its verdict, in a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from unmask.audit.cases.case_names import model_and_case
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.verdict import Judgement, Verdict
from unmask.audit.running.runner import Work
from unmask.progress import Pace, describe_seconds, shown_progress
from unmask.progress import Progress as Report
from unmask.report.numbers import leak, leak_in_full
from unmask.report.page import judgements_by_finding, worst_ruling
from unmask.report.severity import Severity
from unmask.report.worst_leaks import worst_leaks
from unmask.safe_text import quote_word
from unmask.terminal import note, print_json, printable
from unmask.wording import count_noun

OUTCOME_COLOURS = {
    Outcome.LEAK: "red",
    Outcome.NO_LEAK: "green",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.ERROR: "magenta",
}
_SEVERITY_COLOURS = {
    Severity.CRITICAL: "bold red",
    Severity.HIGH: "red",
    Severity.MEDIUM: "yellow",
    Severity.LOW: "yellow",
    Severity.UNKNOWN: "magenta",
    Severity.NONE: "green",
}
_VERDICT_COLOURS = {0: "green", 1: "red", 2: "magenta", 3: "yellow"}
_MOST_NAMED = 20  # findings that are named one by one


class OutputConsole(Console):
    """Standard output whose reader may go away, as `head` does: what is printed then goes nowhere, and nothing ends.

    Rich would end the program with 1, which says that a gate is crossed.
    """

    def on_broken_pipe(self) -> None:
        """Go on in silence."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class AuditTable:
    """Counts of outcomes by channel and model, and how far the audit and the attack that runs are."""

    def __init__(self, work: Work) -> None:
        keys = [_key(case.spec) for case in work.todo] + [_key(finding.case) for finding in work.done]
        self._totals = Counter(keys)
        self._counts: Counter[tuple[tuple[str, str], Outcome]] = Counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeElapsedColumn())
        self._task = self._bar.add_task("cases", total=len(keys), completed=len(work.done))
        self._pace, self._started, self._num_run = Pace(), time.monotonic(), 0
        self._left = len(work.todo)
        for finding in work.done:
            self._counts[_key(finding.case), finding.outcome] += 1

    def add(self, finding: Finding) -> None:
        """Count a finding."""
        self._counts[_key(finding.case), finding.outcome] += 1
        self._num_run += 1
        self._left -= 1
        seconds = (time.monotonic() - self._started) / self._num_run * self._left
        left = f"about {describe_seconds(seconds)} left" if self._left else "done"
        self._bar.update(self._task, advance=1, description=left)
        self._pace = Pace()

    def report(self, stage: str, done: int, total: int) -> None:
        """Follow the attack that runs."""
        self._pace(stage, done, total)

    def __rich__(self) -> Group:
        table = Table("channel", "model", "done", *(outcome.value for outcome in Outcome), title="audit")
        for key, total in self._totals.items():
            counts = [self._counts[key, outcome] for outcome in Outcome]
            cells = [
                Text(str(n), style=OUTCOME_COLOURS[o] if n else "dim") for o, n in zip(Outcome, counts, strict=True)
            ]
            names = (Text(printable(name) or "–") for name in key)
            table.add_row(*names, f"{sum(counts)} of {total}", *cells)
        return Group(table, self._bar, Text(printable(str(self._pace)), style="dim"))


def _key(spec: object) -> tuple[str, str]:
    assert hasattr(spec, "get")
    return str(spec.get("channel")), str(spec.get("model", ""))


@contextmanager
def audit_progress(work: Work) -> Iterator[AuditTable]:
    """What is skipped, then what runs."""
    if work.done:
        total = count_noun(len(work.done) + len(work.todo), "case")
        note(f"skipping {len(work.done)} of {total}, which have a finding already")
    if work.num_others:
        others = count_noun(work.num_others, "finding")
        note(f"the folder also holds {others} of another plan; its files keep them, and this verdict leaves them out")
    with live_table(work) as table:
        yield table


@contextmanager
def live_table(work: Work) -> Iterator[AuditTable]:
    """A live table on standard error; where that is no terminal, a line for each finding."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with shown_progress() as shown:
            yield _LineByLine(work, shown)
        return
    table = AuditTable(work)
    with Live(table, console=console, refresh_per_second=4, transient=True):
        yield table


class _LineByLine(AuditTable):
    """The same for logs, with a line for a step that takes long."""

    def __init__(self, work: Work, shown: Report) -> None:
        super().__init__(work)
        self.report = shown  # type: ignore[method-assign,assignment]

    def add(self, finding: Finding) -> None:
        """One line a finding."""
        super().add(finding)
        seconds = finding.run.get("seconds", 0.0)
        line = f"{finding.id}  {finding.outcome.value:<26}{seconds:8.1f} s  {model_and_case(finding.case)}"
        sys.stderr.write(printable(line, longest=300) + "\n")
        sys.stderr.flush()


def print_verdict(verdict: Verdict, folder: Path, findings: Sequence[Finding], json: bool) -> None:
    """The verdict, the findings that it rests on by name, and what to do next."""
    if json:
        print_json(verdict_document(verdict, folder, findings))
        return
    console = OutputConsole()
    console.print(Panel(Text(printable(verdict.headline)), title="verdict", style=_VERDICT_COLOURS[verdict.exit_code]))
    for title, judgements in (("crossed", verdict.crossed), ("inconclusive", verdict.inconclusive)):
        for judgement in judgements[:_MOST_NAMED]:
            finding = judgement.finding
            value = finding.metrics.get(judgement.gate.metric)
            measured = "" if value is None else f" ({judgement.gate.metric} = {value:.3g})"
            line = f"{title}: '{judgement.gate}'{measured} · {finding.id} · {model_and_case(finding.case)}"
            console.print(Text(printable(line), style=OUTCOME_COLOURS[finding.outcome]))
            if title != "crossed":
                console.print(Text(f"    {printable(_why(judgement))}", style="dim"))
        if len(judgements) > _MOST_NAMED:
            console.print(Text(f"… and {len(judgements) - _MOST_NAMED} more", style="dim"))
    errors = [finding for finding in findings if finding.outcome is Outcome.ERROR]
    for finding in errors[:_MOST_NAMED]:
        line = f"error: {finding.id} · {model_and_case(finding.case)} · {finding.reason}"
        console.print(Text(printable(line), style=OUTCOME_COLOURS[Outcome.ERROR]))
    if errors:
        console.print(Text("fix the cause, then run the same command with --retry-errors", style="dim"))
    console.print(_leaks(verdict, findings))
    console.print(_worst(verdict))
    where = printable(str(folder), longest=4000)
    command = f"unmask report {quote_word(folder)}"
    console.print(Text(f"Results are in {where}. Keep them as private as your data. Next: {command}"))


def _why(judgement: Judgement) -> str:
    """Why a gate is open; where the attack did not end, its own reason says more."""
    finding = judgement.finding
    return f"{judgement.why}; {finding.reason}" if finding.ran_to_the_end else finding.reason


def _leaks(verdict: Verdict, findings: Sequence[Finding]) -> Table:
    """How much leaked in each case, the most first, whether or not a gate is crossed."""
    judgements = judgements_by_finding(verdict)
    told = sorted(
        (finding for finding in findings if finding.outcome is not Outcome.ERROR),
        key=lambda finding: -(leak(finding) or ("", -1.0))[1],
    )
    left_out = f"… and {len(told) - _MOST_NAMED} more, in the report" if len(told) > _MOST_NAMED else None
    table = Table("how much leaked", "gate", "case", box=SIMPLE_HEAD, caption=left_out, caption_justify="left")
    for finding in told[:_MOST_NAMED]:
        table.add_row(
            Text(printable(leak_in_full(finding)), style=OUTCOME_COLOURS[finding.outcome]),
            worst_ruling(judgements.get(finding.id, ())),
            Text(printable(model_and_case(finding.case))),
        )
    return table


def _worst(verdict: Verdict) -> Table:
    """The severity of each channel and model, and the protection that this audit recommends."""
    table = Table("channel", "model", "severity", "recommended by this audit", "what that costs", box=SIMPLE_HEAD)
    for line in worst_leaks(verdict)[:_MOST_NAMED]:
        style = _SEVERITY_COLOURS[line.severity]
        cells = (line.channel, line.model, Text(line.severity.value, style=style), line.advice, line.cost)
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in cells))
    return table


def verdict_document(verdict: Verdict, folder: Path, findings: Sequence[Finding]) -> dict[str, object]:
    """The verdict as plain data; no secret is in it."""
    return {
        "exit_code": verdict.exit_code,
        "headline": verdict.headline,
        "outcomes": {outcome.name: count for outcome, count in verdict.outcomes.items()},
        "gates": [
            {
                "gate": judgement.gate.text,
                "ruling": judgement.ruling.value,
                "why": judgement.why,
                "finding": judgement.finding.id,
                "measured": judgement.finding.metrics.get(judgement.gate.metric),
            }
            for judgement in verdict.judgements
        ],
        "worst": [
            {
                "channel": line.channel,
                "model": line.model,
                "severity": line.severity.value,
                "finding": line.id,
                "leak": line.leak,
                "recommended": line.advice,
                "cost": line.cost,
            }
            for line in worst_leaks(verdict)
        ],
        "missing": list(verdict.missing),
        "findings": [
            {
                "id": finding.id,
                "outcome": finding.outcome.name,
                "status": finding.status,
                "leak": leak_in_full(finding),
                "reason": finding.reason,
            }
            for finding in findings
        ],
        "folder": str(folder),
    }
