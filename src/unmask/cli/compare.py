"""`unmask compare`: two audits in, what leaks more than before out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.options import JsonOption


def compare_command(
    before: Annotated[
        Path, typer.Argument(metavar="RUN_A", help="Folder of the first audit, the one to hold against.")
    ],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of the second audit.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write a page as well; no text is in it.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Shares that differ by no more than this are the same.")
    ] = 0.005,
    json: JsonOption = False,
) -> None:
    """Compare two audits case by case: what leaks more, what leaks less, what is new or gone, what nobody can compare.

    Exit codes: 0 no regression, 1 at least one, 2 bad input, 3 a case was known before and is not now, which is never
    'no regression'.

    Example: [bold]unmask compare runs/main runs/branch[/bold]

    With a page: [bold]unmask compare runs/main runs/branch --html runs/changes.html[/bold]
    """
    from unmask.audit.findings.folder import read_audit
    from unmask.report.comparison import compare_audits
    from unmask.terminal import suppress_broken_pipe
    from unmask.terminal.compare import print_comparison

    audits = read_audit(before), read_audit(after)
    comparison = compare_audits(*audits, tolerance)
    if html is not None:
        from unmask.report.html.compare import render_comparison
        from unmask.report.write import write_for_others

        html.parent.mkdir(parents=True, exist_ok=True)
        write_for_others(html, render_comparison(comparison, audits, (before, after)))
    with suppress_broken_pipe():  # whoever reads may stop; the exit code stays
        print_comparison(comparison, html, json)
    raise typer.Exit(comparison.exit_code)
