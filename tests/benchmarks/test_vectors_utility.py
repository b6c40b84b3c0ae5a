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


def test_the_leak_is_counted(minilm, monkeypatch):
    def nothing(evidence, model, attack):
        assert evidence.vectors.shape == (2, 384)
        return claim_nothing(Run(), Status.NOTHING_FOUND, "nothing", ("vectors",))

    monkeypatch.setattr(vectors_utility, "recover_text", nothing)
    lines = ["One.", "Two."]
    found = vectors_utility.measure_leak(observe_vectors(minilm, lines), minilm, lines, [0, 1], "default")
    assert (found["texts"], found["exact"], found["certain"], found["false"]) == (2, 0, 0, 0)
