"""Two editions of the package on the same tasks: one table, with seconds, tokens a second and ratios."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCE = BENCHMARKS.parent / "src"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gradients.speed")


def run_of(edition: str, seconds: float, size: int = 8) -> dict:
    counts = {"exact": size, "texts": size, "tokens": 24 * size, "false": 0}
    return {"task": "prompts", "size": size, "batch": 0, "edition": edition, "seconds": seconds, **counts}


def test_the_table_has_rates_and_ratios(speed: ModuleType) -> None:
    table = speed.report([run_of("before", 60.0), run_of("now", 16.0)])
    assert "| prompts | 8 | 1 | 60.0 | 16.0 | 3.2 | 12.0 | 3.8× | – | 8 of 8 | 8 of 8 | 0 |" in table
    with_passes = [run_of("before", 60.0), {**run_of("now", 16.0), "passes": 2.04}]
    assert "| 3.8× | 2.0 | 8 of 8 |" in speed.report(with_passes)
    sizes = [run_of(edition, float(size), size) for size in (4, 8) for edition in ("before", "now")]
    assert "slope of the seconds in the number of texts before 1.00, now 1.00" in speed.report(sizes)


def test_both_editions_run_every_task(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    asked = []

    def measure(source: Path, code: str, size: int, batch: int, data: Path) -> dict:
        asked.append((source, code, size))
        return {"seconds": 1.0, "exact": size, "texts": size, "tokens": size, "false": 0}

    data = tmp_path / "sentences.tsv"
    data.write_text("a sentence\n")
    before = tmp_path / "src"
    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["speed", "--before", str(before), "--data", str(data), "--batches", "1"])
    outputs = importlib.import_module("outputs.speed")
    outputs.main()
    tasks = [(code, size) for sizes, code in outputs.TASKS.values() for size in sizes]
    assert asked == [(source, *task) for task in tasks for source in (before, SOURCE)]
    assert all(task in capsys.readouterr().out for task in list(outputs.TASKS)[:1])


@pytest.mark.slow
def test_a_worker_reads_what_a_task_gives(speed: ModuleType, tmp_path: Path) -> None:
    """A task that attacks nothing, in a process of its own."""
    task = """
from types import SimpleNamespace as Made
model = evidence = None
texts = [[1, 2, 3], [4, 5]]
certain = [Made(tokens=(1, 2, 3), count=1), Made(tokens=(9,), count=1)]
found = Made(value=Made(certain=certain, expand=lambda: [(1, 2, 3), (9,)]), certificate=Made(holds=True))
attack = lambda evidence, model: found
"""
    run = speed.measure(SOURCE, task, 2, 0, tmp_path)
    assert (run["exact"], run["texts"], run["tokens"], run["false"]) == (1, 2, 5, 1)


def test_what_tasks_import_is_there(speed: ModuleType) -> None:
    """Tasks are text that other processes run: a name that has moved on would show only there."""
    codes = [code for _, code in (*speed.TASKS.values(), *importlib.import_module("outputs.speed").TASKS.values())]
    imports = [node for code in codes for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(str(node.module))
        assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
