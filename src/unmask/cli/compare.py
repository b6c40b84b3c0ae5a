"""`unmask compare`: audits in, what leaks more than before out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.options import JsonOption, UsageError


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_A RUN_B …", help="Folders of audits, the oldest first; the last two are compared."),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write an HTML page. It contains none of the texts.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Shares that differ by at most this much count as equal.")
    ] = 0.005,
    json: JsonOption = False,
) -> None:
    """Compare two audits case by case: what leaks more or less, and which cases are new, gone or cannot be compared.

    With more than two audits, compare the last two and show the trend over all.

    Exit codes: 0 no regression, 1 at least one, 2 bad input, 3 a regression cannot be ruled out.

    Example: [bold]unmask compare runs/main runs/branch[/bold]

    With a page: [bold]unmask compare runs/main runs/branch --html runs/changes.html[/bold]

    A trend: [bold]unmask compare runs/2026-0* --html runs/trend.html[/bold]
    """
    from unmask.audit.findings.folder import read_audit
    from unmask.report.comparison import compare_audits
    from unmask.report.trend import trend_of
    from unmask.safe_text import last_name
    from unmask.terminal import suppress_broken_pipe
    from unmask.terminal.compare import print_comparison

    if len(runs) < 2:
        raise UsageError(f"two audits or more are compared, got {len(runs)}; give the folder of the earlier one first")
    audits = [read_audit(run) for run in runs]
    comparison = compare_audits(audits[-2], audits[-1], tolerance)
    trend = trend_of(audits) if len(audits) > 2 else []
    names = [last_name(str(run)) for run in runs]
    if html is not None:
        from unmask.report.html.compare import render_comparison
        from unmask.report.write import write_for_others

        html.parent.mkdir(parents=True, exist_ok=True)
        write_for_others(html, render_comparison(comparison, audits, names, trend))
    with suppress_broken_pipe():  # whoever reads may stop; the exit code stays
        print_comparison(comparison, names, trend, html, json)
    raise typer.Exit(comparison.exit_code)
