"""The benchmark of defences of vectors runs on a few texts, and its numbers are those of the library."""

from __future__ import annotations

import json
import sys

import pytest
from outputs import vectors_utility

from unmask.attacks.claims import claim_nothing
from unmask.attacks.run import Run
from unmask.protocols import observe_vectors
from unmask.recovery import Status


def test_it_measures_the_search(minilm, tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    options = ["--corpus", "20", "--defences", "none", "rotate", "private:epsilon=1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["vectors-utility", *options])
    vectors_utility.main()
    rows = {row["defence"]: row["recall_at_10"] for row in json.loads(out.read_text())["utility"]}
    assert rows["none"] == 1
    assert rows["rotate"] == pytest.approx(1, abs=0.02)
    assert rows["private:epsilon=1"] < 0.8
    assert "rotate" in capsys.readouterr().out


def test_the_figure_names_every_defence(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"defence": name, "recall_at_10": 0.5, "texts": 4, "exact": 1} for name in ("rotate", "signs")]
    vectors_utility.draw(rows, tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "rotate, signs" in drawn


def test_the_leak_is_counted(minilm, monkeypatch):
    def nothing(evidence, model, attack):
        assert evidence.vectors.shape == (2, 384)
        return claim_nothing(Run(), Status.NOTHING_FOUND, "nothing", ("vectors",))

    monkeypatch.setattr(vectors_utility, "recover_text", nothing)
    lines = ["One.", "Two."]
    found = vectors_utility.measure_leak(observe_vectors(minilm, lines), minilm, lines, [0, 1], "default")
    assert (found["texts"], found["exact"], found["certain"], found["false"]) == (2, 0, 0, 0)
