from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report.findings import HOSTILE, audit_of, failed, text_case, text_finding

from unmask.report.comparison import compare_audits
from unmask.report.trend import trend_of
from unmask.terminal.compare import comparison_document, print_comparison

CASES = [text_case(batch_size=size) for size in (1, 4, 16)]
BEFORE = [text_finding(CASES[0], 0.5), text_finding(CASES[1], 1.0, 4)]
AFTER = [text_finding(CASES[0], 1.0, 1), failed(CASES[1]), text_finding(CASES[2], 1.0)]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")


def test_a_regression_is_one_line_with_its_id(capsys):
    print_comparison(compare_audits(audit_of(BEFORE), audit_of(AFTER)), [], [], Path("page.html"), json=False)
    lines = capsys.readouterr().out.splitlines()
    (worse,) = [line for line in lines if line.startswith("worse: ")]
    assert AFTER[0].id in worse
    assert "Texts recovered exactly: 0 → 1" in worse
    assert any("not compared" in line and "now: error, which is no improvement" in line for line in lines)
    assert any(line.strip().startswith("new ") for line in lines)
    assert lines[-1] == "wrote page.html"


def test_many_of_one_kind_are_counted(capsys):
    more = [text_finding(text_case(seed=seed), 1.0) for seed in range(1, 31)]
    print_comparison(compare_audits(audit_of(BEFORE), audit_of(BEFORE + more)), [], [], None, json=False)
    assert "… and 10 more" in capsys.readouterr().out


def test_machines_get_everything_in_ascii(capsys):
    comparison = compare_audits(audit_of(BEFORE), audit_of(AFTER))
    print_comparison(comparison, ["a", "b"], [], None, json=True)
    out = capsys.readouterr().out
    assert out.isascii()
    document = json.loads(out)
    assert document == comparison_document(comparison, ["a", "b"], [], None)
    assert document["counts"] == {"WORSE": 1, "OPEN": 1, "BETTER": 0, "NEW": 1, "GONE": 0, "SAME": 0}
    assert document["changes"][0]["after"]["id"] == AFTER[0].id


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_shown_escaped(capsys, text):
    case = text_case(model=text, defences=[text])
    audits = [audit_of([text_finding(case, recall)]) for recall in (0.5, 0.5, 1.0)]
    print_comparison(compare_audits(*audits[1:]), [text] * 3, trend_of(audits), None, json=False)
    assert all(sign.isprintable() or sign == "\n" for sign in capsys.readouterr().out)
