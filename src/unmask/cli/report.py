"""`unmask report`: findings in, reports out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.options import EXIT_DONE, JsonOption


class FormatName(StrEnum):
    """Formats by their command-line names."""

    html = "html"
    markdown = "markdown"
    junit = "junit"
    sarif = "sarif"


def report_command(
    folder: Annotated[Path, typer.Argument(help="Folder of an audit: its manifest and its findings.")],
    show_secrets: Annotated[
        bool,
        typer.Option(
            "--show-secrets", help="Put the texts into the HTML file. Keep that file as private as the texts."
        ),
    ] = False,
    formats: Annotated[
        list[FormatName] | None, typer.Option("--format", help="Write only this format; repeatable. Default: all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the reports. Default: the audit's folder.")
    ] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Exit with the verdict's code instead of 0.")] = False,
    json: JsonOption = False,
) -> None:
    """Build the reports of an audit from its findings: HTML, Markdown, JUnit and SARIF. Texts are redacted.

    Example: [bold]unmask report runs/release[/bold]

    Another: [bold]unmask report runs/release --format html --show-secrets[/bold]

    In CI: [bold]unmask report runs/release --format junit --format sarif --gate[/bold]
    """
    from rich.text import Text

    from unmask.audit.findings.folder import read_audit
    from unmask.audit.findings.verdict import reach_verdict
    from unmask.report.write import FORMATS, write_reports_of
    from unmask.terminal import print_json, printable, suppress_broken_pipe
    from unmask.terminal.audit import OutputConsole

    audit = read_audit(folder)
    verdict = reach_verdict(audit)
    wanted = [name.value for name in formats] if formats else list(FORMATS)
    paths = write_reports_of(audit, verdict, folder, show_secrets=show_secrets, formats=wanted, out=out)
    if json:
        reports = {name: str(path) for name, path in paths.items()}
        with suppress_broken_pipe():
            print_json({"exit_code": verdict.exit_code, "headline": verdict.headline, "reports": reports})
    else:
        console = OutputConsole()
        console.print(Text(printable(verdict.headline, longest=4000), style="bold"))
        for name, path in paths.items():
            console.print(Text(f"{name:9} {printable(str(path), longest=4000)}"), soft_wrap=True)
        if show_secrets and "html" in paths:
            console.print(Text("the HTML file contains the texts; keep it as private as they are", style="yellow"))
    raise typer.Exit(verdict.exit_code if gate else EXIT_DONE)
