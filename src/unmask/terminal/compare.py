"""The comparison of audits in a terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unmask.audit.cases.case_names import full_name
from unmask.audit.findings.finding import Finding
from unmask.report.comparison import Change, Comparison, Direction
from unmask.report.numbers import leak_in_full
from unmask.report.trend import TrendLine, TrendPoint
from unmask.safe_text import make_safe as printable
from unmask.terminal import print_json
from unmask.terminal.audit import OutputConsole

_MOST_NAMED = 20  # cases of one kind but regressions, which are all named
_COLOURS = {Direction.WORSE: "red", Direction.OPEN: "yellow", Direction.BETTER: "green"}
_VERDICT_COLOURS = {0: "green", 1: "red", 3: "yellow"}


def print_comparison(
    comparison: Comparison, names: Sequence[str], trend: Sequence[TrendLine], page: Path | None, json: bool
) -> None:
    """The headline, one line for each regression, a table of what else changed, and the trend over all audits."""
    if json:
        print_json(comparison_document(comparison, names, trend, page))
        return
    console = OutputConsole()
    headline = Text(printable(comparison.headline))
    console.print(Panel(headline, title="comparison", style=_VERDICT_COLOURS[comparison.exit_code]))
    for change in comparison.of(Direction.WORSE):
        line = f"worse: {full_name(change.case)} · {_id(change)} · {change.why}"
        console.print(Text(printable(line, longest=1000), style=_COLOURS[Direction.WORSE]), soft_wrap=True)
    table = Table("", "case", "what changed", box=SIMPLE_HEAD)
    for direction in (Direction.OPEN, Direction.BETTER, Direction.NEW, Direction.GONE):
        changes = comparison.of(direction)
        for change in changes[:_MOST_NAMED]:
            word = Text(direction.value, style=_COLOURS.get(direction, ""))
            table.add_row(word, Text(printable(full_name(change.case))), Text(printable(change.why)))
        if len(changes) > _MOST_NAMED:
            table.add_row(direction.value, f"… and {len(changes) - _MOST_NAMED} more", "see --html or --json")
    if table.row_count:
        console.print(table)
    if trend:
        console.print(_trend(names, trend))
    for note in comparison.notes:
        console.print(Text(f"note: {printable(note)}", style="dim"))
    if page is not None:
        console.print(Text(f"wrote {printable(str(page), longest=4000)}"), soft_wrap=True)


def _trend(names: Sequence[str], trend: Sequence[TrendLine]) -> Table:
    """Cases that leak in each audit, of those that all have run."""
    table = Table("channel", "model", "cases", *(escape(printable(name)) for name in names), box=SIMPLE_HEAD)
    table.title = "cases that leak"
    for line in trend:
        cells = (line.channel, line.model, str(line.num_cases), *map(_point, line.points))
        table.add_row(*map(Text, cells))
    return table


def _point(point: TrendPoint) -> str:
    unknown = f", {point.num_unknown} not known" if point.num_unknown else ""
    return f"{point.num_leaks}{unknown} ({point.severity.value})"


def comparison_document(
    comparison: Comparison, names: Sequence[str], trend: Sequence[TrendLine], page: Path | None
) -> dict[str, Any]:
    """The comparison as plain data; no secret is in it."""
    return {
        "exit_code": comparison.exit_code,
        "headline": comparison.headline,
        "counts": {direction.name: len(comparison.of(direction)) for direction in Direction},
        "notes": list(comparison.notes),
        "changes": [
            {
                "direction": change.direction.name,
                "case": full_name(change.case),
                "why": change.why,
                "before": _state(change.before),
                "after": _state(change.after),
            }
            for change in comparison.changes
        ],
        "runs": list(names),
        "trend": [
            {
                "channel": line.channel,
                "model": line.model,
                "cases": line.num_cases,
                "points": [
                    {"leaks": point.num_leaks, "unknown": point.num_unknown, "severity": point.severity.value}
                    for point in line.points
                ],
            }
            for line in trend
        ],
        "page": None if page is None else str(page),
    }


def _state(finding: Finding | None) -> dict[str, str] | None:
    if finding is None:
        return None
    return {
        "id": finding.id,
        "outcome": finding.outcome.name,
        "status": finding.status,
        "leak": leak_in_full(finding),
    }


def _id(change: Change) -> str:
    found = change.after or change.before
    return "" if found is None else found.id
