"""The benchmark of the paper on attention outputs writes what it was asked to write, and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "newton_iterations.svg"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark with paths that are known in advance instead of Newton's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("outputs.paper")
    monkeypatch.setattr(module, "path", lambda *_: [1e-1, 1e-5, 1e-9, 1e-13])
    return module


def test_iterations_leave_the_figure_of_the_docs_alone(benchmark, tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(benchmark, "plot", lambda *given: drawn.append(given))
    before = FIGURE.read_bytes()
    benchmark.main(["iterations", "--out", str(tmp_path / "out.json")])
    assert not drawn
    assert FIGURE.read_bytes() == before
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 2 * 3 * 4 * 4


def test_a_figure_is_drawn_where_it_was_asked_for(benchmark, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    benchmark.main(["iterations", "--out", str(tmp_path / "out.json"), "--plot", str(tmp_path / "steps.svg")])
    assert "<svg" in (tmp_path / "steps.svg").read_text()


def test_a_figure_of_another_mode_is_refused(benchmark, tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["gamma", "--plot", str(tmp_path / "steps.svg")])
    assert "--plot is for 'iterations'" in capsys.readouterr().err
