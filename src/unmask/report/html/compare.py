"""The comparison of audits as one HTML file in the report's colours. It has no script, and no text of anybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import FunctionLoader
from markupsafe import Markup

from unmask.audit.cases.case_names import full_name
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import CROSSED, INCONCLUSIVE
from unmask.report.comparison import Change, Comparison, Direction
from unmask.report.html.render import content_security_policy, icon_of, make_environment, read_asset
from unmask.report.numbers import leak_in_full
from unmask.report.page import Hero, plan_of
from unmask.report.trend import TrendLine
from unmask.safe_text import make_safe

MAX_ROWS = 500  # of one table; --json has all of them
_PILLS = {
    Direction.WORSE: "o-LEAK",
    Direction.OPEN: "o-INCONCLUSIVE",
    Direction.BETTER: "o-NO_LEAK",
    Direction.NEW: "",
    Direction.GONE: "",
    Direction.SAME: "",
}
_TILES = {Direction.WORSE: "o-LEAK", Direction.OPEN: "o-INCONCLUSIVE", Direction.BETTER: "o-NO_LEAK"}
_TITLES = {
    Direction.WORSE: "Worse: regressions",
    Direction.OPEN: "Could not be compared",
    Direction.BETTER: "Better",
    Direction.NEW: "New in the second audit",
    Direction.GONE: "Gone from the second audit",
    Direction.SAME: "The same",
}


@dataclass(frozen=True)
class _Side:
    """One audit in the header."""

    word: str
    folder: str
    title: str
    version: str
    created: str
    num_findings: int


def render_comparison(
    comparison: Comparison, audits: Sequence[Audit], names: Sequence[str], trend: Sequence[TrendLine] = ()
) -> str:
    """The whole page: the last two audits compared, and the trend over all of them."""
    style = read_asset("report.css")
    face = _hero(comparison)
    groups = [
        (direction, _TITLES[direction], _PILLS[direction], [_row(one) for one in changes[:MAX_ROWS]], len(changes))
        for direction in Direction
        if (changes := comparison.of(direction))
    ]
    words = ["Before"] * (len(audits) - 2) + ["First", "Second"]
    sides = [_side(*one) for one in zip(words, audits, names, strict=True)]
    return (
        make_environment(FunctionLoader(read_asset))
        .get_template("compare.html.j2")
        .render(
            title=f"{sides[-2].folder} → {sides[-1].folder}",
            policy=content_security_policy(style),
            icon=icon_of(face.kind),
            style=Markup(style),
            hero=face,
            headline=make_safe(comparison.headline, 2000),
            exit_code=comparison.exit_code,
            notes=[make_safe(note, 1000) for note in comparison.notes],
            tiles=[(one.value, _TILES.get(one, ""), len(comparison.of(one))) for one in Direction],
            groups=groups,
            trend=[(line, _curve(line)) for line in trend],
            sides=sides,
        )
    )


def _hero(comparison: Comparison) -> Hero:
    match comparison.exit_code:
        case code if code == CROSSED:
            return Hero("crossed", "Regression", "At least one case leaks more than before.")
        case code if code == INCONCLUSIVE:
            return Hero("unclear", "Inconclusive", _what_is_open(comparison))
    note = "With these attacks no case leaks more than before. This does not say whether the leaks are acceptable."
    return Hero("neutral", "No regression", note)


def _what_is_open(comparison: Comparison) -> str:
    """Why a regression cannot be ruled out, and what to do about it."""
    said = []
    if any(change.is_lost for change in comparison.changes):
        said.append("Some cases had a result before and have none now, which is not an improvement: run them again.")
    if any(change.is_new_leak for change in comparison.changes):
        said.append("New cases leak: run the first audit with the second plan, so that they have a baseline.")
    return " ".join(said) or "No case has a result in both audits: run both again."


def _curve(line: TrendLine) -> str:
    """The share of cases that leak, one point an audit, from left to right in a picture of 100 × 24."""
    step = 96 / (len(line.points) - 1)
    heights = [22 - 20 * point.num_leaks / line.num_cases for point in line.points]
    return " ".join(f"{2 + place * step:.1f},{height:.1f}" for place, height in enumerate(heights))


def _side(word: str, audit: Audit, name: str) -> _Side:
    manifest = audit.manifest
    return _Side(
        word,
        make_safe(name, 120),
        make_safe(plan_of(manifest).get("title") or "", 200),
        make_safe(manifest.get("unmask", ""), 40),
        make_safe(manifest.get("created", ""), 40),
        len(audit.findings),
    )


def _row(change: Change) -> tuple[str, str, str, str, str]:
    """Name, leak before, leak now, why, id."""
    found = change.after or change.before
    return (
        full_name(change.case),
        _leak(change.before),
        _leak(change.after),
        make_safe(change.why, 1000),
        "" if found is None else make_safe(found.id),
    )


def _leak(finding: Finding | None) -> str:
    if finding is None:
        return "–"
    is_known = finding.outcome in (Outcome.LEAK, Outcome.NO_LEAK)
    return f"{finding.outcome.value}: {leak_in_full(finding)}" if is_known else finding.outcome.value
