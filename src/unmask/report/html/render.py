"""The report as one HTML file that asks nobody for anything: styles, charts, data and script are inside."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import BaseLoader, Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from unmask.audit.findings.finding import Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import Verdict
from unmask.report import page
from unmask.report.html import svg
from unmask.report.html.curves import MAX_CHARTS, Chart, Line, charts_of
from unmask.report.html.page_data import as_script, page_data
from unmask.report.numbers import percent, scientific
from unmask.report.severity import Severity
from unmask.report.worst_leaks import worst_leaks
from unmask.safe_text import last_name, make_safe, quote_word

_COLOURS = {"crossed": "#b42318", "error": "#6d3fc0", "unclear": "#b26a00", "held": "#0b6e5f", "neutral": "#475467"}


def render_html(audit: Audit, verdict: Verdict, folder: Path, show_secrets: bool = False) -> str:
    """The whole page. Without `show_secrets` no piece of a text is in it."""
    environment = make_environment(FunctionLoader(read_asset))
    environment.filters["breakable"] = _breakable
    style, script = read_asset("report.css"), read_asset("report.js")
    planned = {case["id"]: case.get("case") or {} for case in audit.planned}
    gated = {judgement.finding.id for judgement in verdict.judgements}
    charts = charts_of(audit.findings, [planned[case_id] for case_id in verdict.missing], gated)
    face = page.hero(verdict)
    places = {finding.id: place for place, finding in enumerate(audit.findings)}
    rows = page.rows(audit, verdict)
    return environment.get_template("report.html.j2").render(
        title=make_safe(page.plan_of(audit.manifest).get("title") or "Audit", 200),
        policy=content_security_policy(style, script),
        icon=icon_of(face.kind),
        style=Markup(style),
        script=Markup(script),
        hero=face,
        verdict=verdict,
        headline=make_safe(verdict.headline, 2000),
        gates=page.gate_lines(verdict, places),
        missing=page.missing_cases(audit),
        failed=page.failed_cases(audit),
        num_damaged=audit.num_damaged,
        summary=page.summary(audit),
        worst=worst_leaks(verdict),
        severities=Severity,
        outcomes=Outcome,
        charts=[_figure(chart, number) for number, chart in enumerate(charts[:MAX_CHARTS])],
        num_charts_left_out=max(0, len(charts) - MAX_CHARTS),
        rows=rows,
        channels=sorted({row.channel for row in rows}),
        show_secrets=show_secrets,
        manifest=page.manifest_tables(audit.manifest, show_secrets),
        other_versions=page.other_versions(audit),
        created=make_safe(audit.manifest.get("created", "")),
        version=make_safe(audit.manifest.get("unmask", "")),
        folder=quote_word(last_name(str(folder))),
        page_data=as_script(page_data(audit, verdict, folder, rows, show_secrets)),
    )


def make_environment(loader: BaseLoader) -> Environment:
    """Templates that escape all they are given, and refuse what they are not."""
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def content_security_policy(style: str, script: str | None = None) -> str:
    """Nothing may load, and only this style and this script may run; hostile text cannot add a third."""
    scripts = "none" if script is None else _digest(script)
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{scripts}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _figure(chart: Chart, number: int) -> dict[str, Any]:
    least, most = chart.seeds
    if most == 1:
        seeds = "One seed a point, so no interval is drawn."
    else:
        counts = f"{most}" if least == most else f"{least} to {most}"
        lone = " Points with one seed have no bar." if least == 1 else ""
        seeds = f"Mean of {counts} seeds; bars: 95 % Student's t interval over seeds, cut at 0 and 100 %.{lone}"
    points = [point for line in chart.lines for point in line.points]
    sentences = [seeds]
    if any(point.chance is not None for point in points):
        sentences.append("Dashed: chance.")
    if any(point.is_open for point in points):
        sentences.append("Hollow, dotted: a run is inconclusive, failed or was not run, so a low value means nothing.")
    if num_empty := sum(len(line.empty) for line in chart.lines):
        sentences.append(f"{num_empty} more {'position has' if num_empty == 1 else 'positions have'} no value at all.")
    if num_ungated := sum(line.num_ungated for line in chart.lines):
        sentences.append(
            f"Not drawn: {num_ungated} {'case' if num_ungated == 1 else 'cases'} without a gate (controls)."
        )
    if 0.0 in {point.x for point in points}:
        is_private = "DP-SGD" in chart.axis.name
        sentences.append(
            "'none': clipped, without noise." if is_private else "'none': the same case without this noise."
        )
    if float("inf") in {point.x for point in points}:
        sentences.append("'∞': plain FedSGD, which guarantees nothing.")
    return {
        "title": chart.title,
        "channel": make_safe(chart.channel),
        "svg": svg.draw(chart, number),
        "legend": [(svg.marker(index, 8, 8), line.name) for index, line in enumerate(chart.lines)],
        "chances": svg.chance_legend(chart.lines),
        "caption": " ".join(sentences),
        "axis": chart.axis.title,
        "table": [cells for line in chart.lines for cells in _numbers(line)],
    }


def _numbers(line: Line) -> list[tuple[str, ...]]:
    """The rows of a line, places without any value last."""
    rows = [
        (
            line.name,
            "none" if point.x == 0 else scientific(point.x),
            percent(point.mean),
            "–" if point.low is None or point.high is None else f"{percent(point.low)} to {percent(point.high)}",
            "–" if point.chance is None else percent(point.chance),
            str(point.num_runs),
            str(point.num_unclear),
            str(point.num_lost),
        )
        for point in line.points
    ]
    empty = [
        (line.name, "none" if x == 0 else scientific(x), "no value", "–", "–", "0", "0", str(count))
        for x, count in line.empty
    ]
    return [*rows, *empty]


def _breakable(text: str) -> Markup:
    """Text that may break after a comma; settings are long words."""
    return Markup(str(escape(text)).replace(",", ",<wbr>"))


def read_asset(name: str) -> str:
    """A template, a style or a script of the report."""
    return (files("unmask.report.html") / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def icon_of(kind: str) -> str:
    """The tab's icon in the verdict's colour, as an address that holds its own picture."""
    circle = f"<circle cx='8' cy='8' r='7' fill='{_COLOURS[kind]}'/>"
    picture = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>{circle}</svg>"
    return f"data:image/svg+xml,{quote(picture)}"
