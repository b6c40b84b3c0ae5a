"""One command runs every benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("run")


def test_every_benchmark_has_help(run: ModuleType, capsys: pytest.CaptureFixture) -> None:
    for room, scripts in run.ROOMS.items():
        for script, modes in scripts.items():
            for mode in modes:
                with pytest.raises(SystemExit) as ending:
                    run.main([room, mode, "--help"])
                assert ending.value.code == 0
                assert (mode if len(modes) > 1 else script) in capsys.readouterr().out


def test_the_list_has_every_benchmark(run: ModuleType, capsys: pytest.CaptureFixture) -> None:
    run.main([])
    shown = capsys.readouterr().out
    assert all(f"{room} {mode}" in shown for room in run.ROOMS for each in run.ROOMS[room].values() for mode in each)
    with pytest.raises(SystemExit, match="no benchmark 'outputs nowhere'"):
        run.main(["outputs", "nowhere"])


def test_every_script_of_a_room_is_in_the_list_or_imported_by_one(run: ModuleType) -> None:
    listed = {script for scripts in run.ROOMS.values() for script in scripts}
    sources = "".join(path.read_text(encoding="utf-8") for path in BENCHMARKS.rglob("*.py"))
    for room in run.ROOMS:
        for path in (BENCHMARKS / room).glob("*.py"):
            name = f"{room}.{path.stem}"
            assert name in listed or f"from {name} import" in sources or f"from {room} import {path.stem}" in sources


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], ""),
        (["paper", "queries", "--only-page", "--results", "nosuch.json"], "nosuch.json does not exist"),
        (["paper", "unmasking", "--only-page", "--out", "nosuch.json"], "nosuch.json does not exist"),
        (["paper", "unmasking", "--docs", "nofolder"], "nofolder is no folder"),
        (["paper", "dager", "--only-page", "--page", "nofolder/x.md"], "nofolder is no folder"),
        (["gradients", "beyond", "--data", "nosuch.tsv"], "nosuch.tsv is no file"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(
    run: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ending:
        run.main(arguments)
    assert ending.value.code not in (0, None)
    assert message in capsys.readouterr().err
