"""Writes the reports of an audit's folder, from its manifest and its findings alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from unmask.audit.findings.folder import Audit, read_audit, write_whole
from unmask.audit.findings.verdict import Verdict, reach_verdict
from unmask.errors import InputError

FORMATS = ("html", "markdown", "junit", "sarif")
NAMES: Mapping[str, str] = {
    "html": "report.html",
    "markdown": "report.md",
    "junit": "junit.xml",
    "sarif": "report.sarif",
}


def write_reports(
    folder: str | Path, *, show_secrets: bool = False, formats: Iterable[str] = FORMATS, out: str | Path | None = None
) -> dict[str, Path]:
    """Write the reports and give their paths by format. Only HTML ever holds the texts, and only if they are wanted."""
    folder = Path(folder)
    audit = read_audit(folder)
    verdict = reach_verdict(audit)
    return write_reports_of(audit, verdict, folder, show_secrets=show_secrets, formats=formats, out=out)


def write_reports_of(
    audit: Audit,
    verdict: Verdict,
    folder: Path,
    *,
    show_secrets: bool = False,
    formats: Iterable[str] = FORMATS,
    out: str | Path | None = None,
) -> dict[str, Path]:
    """The same for an audit that was read and judged already."""
    wanted = list(dict.fromkeys(formats))
    unknown = [name for name in wanted if name not in NAMES]
    if unknown or not wanted:
        raise InputError(f"formats must be some of {', '.join(FORMATS)}, got {', '.join(unknown) or 'none'}")
    home = folder if out is None else Path(out)
    home.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in wanted:
        path = home / NAMES[name]
        write = write_whole if show_secrets and name == "html" else write_for_others
        write(path, _renderer(name, show_secrets)(audit, verdict, folder))
        paths[name] = path
    return paths


def write_for_others(path: Path, text: str) -> None:
    """Write a file without secrets whole or not at all, with the rights that files usually have."""
    write_whole(path, text)
    os.chmod(path, 0o666 & ~_umask())


def _umask() -> int:
    """What the process keeps from others; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _renderer(name: str, show_secrets: bool) -> Callable[[Audit, Verdict, Path], str]:
    match name:
        case "html":
            from unmask.report.html.render import render_html

            return lambda audit, verdict, folder: render_html(audit, verdict, folder, show_secrets)
        case "markdown":
            from unmask.report.markdown import render_markdown

            return render_markdown
        case "junit":
            from unmask.report.junit import render_junit

            return render_junit
        case _:
            from unmask.report.sarif import render_sarif

            return render_sarif
