"""The benchmark of the paper on queries measures small cases, and its page holds what is stored."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from paper import queries, queries_page

from unmask.attacks.queries.many_heads.circle_heads import CircleHeadsAttack


def test_one_case_is_measured_and_the_page_is_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(queries, "BOUNDED", ("2x6",))
    options = ["--parts", "bounded", "--bounded", "2x6", "--kinds", "float64", "--docs", str(tmp_path)]
    queries.main([*options, "--results", str(tmp_path / "found.json")])
    stored = json.loads((tmp_path / "found.json").read_text())
    (row,) = stored["bounded"]["rows"]
    assert row["status"] == "RECOVERED"
    assert row["error"] < 1e-9
    assert "| 2, 6, ≤ 9.8 |" in (tmp_path / queries_page.PAGE).read_text()


def test_the_page_is_that_of_the_stored_results(tmp_path):
    pytest.importorskip("matplotlib")
    queries.main(["--only-page", "--docs", str(tmp_path)])
    for name in (queries_page.PAGE, *queries_page.PLOTS.values()):
        assert (tmp_path / name).read_text() == (queries.DOCS / name).read_text(), f"write {name} again: --only-page"


def test_no_stored_run_returned_wrong_weights():
    stored = json.loads(queries.RESULTS.read_text())
    for part in ("counts", "bounded", "multiples", "samples"):
        assert not [row for row in stored[part]["rows"] if row["false"]]
    chance = [row for row in stored["multiples"]["rows"] if "chance" in row["layer"]]
    assert chance
    assert all(row["status"] != "RECOVERED" for row in chance)
    assert next(row for row in stored["samples"]["rows"] if row["noise"] is None)["recovered"] == 0


def test_proposition_C_2_and_theorem_4_1_take_exactly_their_count():
    rows = json.loads(queries.RESULTS.read_text())["counts"]["rows"]
    exact = [row for row in rows if row["what"] in ("Thm 4.1", "Prop. C.2", "Thm 5.1")]
    assert len(exact) == 7
    assert all(row["queries"] == row["count"] for row in exact)


def test_rows_of_other_cases_are_kept():
    rows = [{"heads": 2, "width": 6, "answers": "float64"}, {"heads": 2, "width": 8, "answers": "float64"}]
    options = SimpleNamespace(bounded=["2x6"], kinds=["float64"])
    assert queries.keep_others(rows, options) == rows[1:]


def test_a_false_claim_would_be_counted():
    heads, other = (queries.random_heads(1, 6, seed=seed) for seed in range(2))
    row = queries.measured(CircleHeadsAttack(), other, heads, 10.0)
    assert row["status"] == "RECOVERED"
    assert row["false"]


def test_noise_is_within_tau():
    head = queries.random_heads(1, 4)
    X = torch.randn(50, 2, 4, dtype=torch.float64)
    off = (queries.added(0.1, head)(X) - head(X)).abs()
    assert float(off.max()) <= 0.1


def test_numbers_are_short():
    assert [queries_page._number(x) for x in (None, 3.2e-15, 0.5, 1234, "a", 0.0)] == [
        *("–", "3e-15", "0.5", "1,234", "a", "0")
    ]
