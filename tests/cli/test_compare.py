"""`unmask compare`: exit codes, and a real pair of small audits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.answers import Answer, Call
from tests.audit.made import random_group, write_plan
from tests.report.findings import audit_of, failed, text_case, text_finding, write_audit

from unmask import cli

NO_REGRESSION, REGRESSION, BAD_INPUT, INCONCLUSIVE, USAGE = 0, 1, 2, 3, 4
ALL, HALF = text_finding(text_case(), 1.0, 4), text_finding(text_case(), 0.5)
QUIET = text_finding(text_case(seed=1), 0.0)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None) -> Iterator[Call]:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["unmask", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return Answer(left.value.code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (ALL, ALL, NO_REGRESSION),
        (ALL, HALF, NO_REGRESSION),
        (HALF, ALL, REGRESSION),
        (ALL, failed(text_case()), INCONCLUSIVE),
        (ALL, text_finding(text_case(seed=1), 1.0, 4), BAD_INPUT),
    ],
)
def test_exit_codes(call, tmp_path, before, after, code):
    folders = [write_audit(tmp_path / name, audit_of([one])) for name, one in (("a", before), ("b", after))]
    answer = call("compare", *folders)
    assert answer.code == code, answer.err
    assert ("worse: gradients · smollm2-135m" in answer.told) == (code == REGRESSION)


def test_folders_that_hold_no_audit(call, tmp_path):
    folder = write_audit(tmp_path / "a", audit_of([ALL]))
    answer = call("compare", folder, tmp_path / "none")
    assert answer.code == BAD_INPUT
    assert "holds no audit" in answer.message


def test_the_page_and_the_document(call, tmp_path):
    folders = [write_audit(tmp_path / name, audit_of([one])) for name, one in (("a", HALF), ("b", ALL))]
    page = tmp_path / "pages" / "changes.html"
    answer = call("compare", *folders, "--html", page, "--json")
    assert answer.code == REGRESSION
    assert json.loads(answer.out)["page"] == str(page)
    assert "Regression</h1>" in page.read_text()


def test_shares_may_differ_by_the_tolerance(call, tmp_path):
    cases = (HALF, text_finding(text_case(), 0.52))
    folders = [write_audit(tmp_path / name, audit_of([one])) for name, one in zip("ab", cases, strict=True)]
    assert call("compare", *folders).code == REGRESSION
    assert call("compare", *folders, "--tolerance", 0.1).code == NO_REGRESSION


def test_a_real_pair_of_audits(call, tmp_path: Path):
    """A leak that is new may be an old case without its protection, and a case that is gone tells nothing."""
    for name, seeds in (("a", [0]), ("b", [0, 1])):
        plan = write_plan(tmp_path / f"{name}.toml", random_group(seeds))
        assert call("audit", plan, "--out", tmp_path / name, "--threads", 1).code == 0
    answer = call("compare", tmp_path / "a", tmp_path / "b")
    assert answer.code == INCONCLUSIVE
    assert (
        "Inconclusive: 1 new case leaks and has no baseline, so a regression cannot be ruled out; 1 new, 1 same."
        in answer.told
    )
    assert "now: leaks; the first audit has no such case" in answer.told
    gone = call("compare", tmp_path / "b", tmp_path / "a", "--json")
    assert gone.code == INCONCLUSIVE
    assert (gone.document["counts"]["GONE"], gone.document["counts"]["BETTER"]) == (1, 0)


def test_a_new_case_that_does_not_leak_is_no_regression(call, tmp_path):
    folders = [write_audit(tmp_path / name, audit_of(ones)) for name, ones in (("a", [ALL]), ("b", [ALL, QUIET]))]
    answer = call("compare", *folders)
    assert (answer.code, "No case got worse; 1 new, 1 same." in answer.told) == (NO_REGRESSION, True)


def test_of_several_audits_the_last_two_decide_and_the_trend_is_told(call, tmp_path):
    runs = (("first", ALL), ("second", HALF), ("third", ALL))
    folders = [write_audit(tmp_path / name, audit_of([one])) for name, one in runs]
    answer = call("compare", *folders, "--html", tmp_path / "trend.html")
    assert answer.code == REGRESSION
    assert "cases that leak" in answer.told
    assert "Trend</h2>" in (tmp_path / "trend.html").read_text(encoding="utf-8")
    document = call("compare", *folders[:1], *folders[:2], "--json").document
    assert document["runs"] == ["first", "first", "second"]
    assert [point["leaks"] for point in document["trend"][0]["points"]] == [1, 1, 1]


def test_one_audit_cannot_be_compared(call, tmp_path):
    answer = call("compare", write_audit(tmp_path / "a", audit_of([ALL])))
    assert answer.code == USAGE
    assert "two audits or more are compared, got 1" in answer.message
