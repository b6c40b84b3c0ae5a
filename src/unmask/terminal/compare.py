"""The comparison of two audits in a terminal, and as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unmask.audit.cases.case_names import full_name
from unmask.audit.findings.finding import Finding
from unmask.report.comparison import Change, Comparison, Direction
from unmask.report.numbers import leak_in_full
from unmask.safe_text import make_safe as printable
from unmask.terminal import print_json
from unmask.terminal.audit import OutputConsole

_MOST_NAMED = 20  # cases of one kind but regressions, which are all named
_COLOURS = {Direction.WORSE: "red", Direction.OPEN: "yellow", Direction.BETTER: "green"}
_VERDICT_COLOURS = {0: "green", 1: "red", 3: "yellow"}


def print_comparison(comparison: Comparison, page: Path | None, json: bool) -> None:
    """The headline, one line for each regression, and a table of what else changed."""
    if json:
        print_json(comparison_document(comparison, page))
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
            table.add_row(direction.value, f"… and {len(changes) - _MOST_NAMED} more", "--html and --json have them")
    if table.row_count:
        console.print(table)
    for note in comparison.notes:
        console.print(Text(f"note: {printable(note)}", style="dim"))
    if page is not None:
        console.print(Text(f"wrote {printable(str(page), longest=4000)}"), soft_wrap=True)


def comparison_document(comparison: Comparison, page: Path | None) -> dict[str, Any]:
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
