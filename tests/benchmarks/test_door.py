"""The doors to the benchmarks lead to every script."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("channel", ["outputs", "queries"])
def test_a_door_knows_every_mode(channel: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    scripts = importlib.import_module(channel).MODES
    enter = importlib.import_module("door").enter
    assert set(scripts) <= {path.stem for path in BENCHMARKS.glob(f"{channel}_*.py")}
    for script, modes in scripts.items():
        for mode in modes:
            with pytest.raises(SystemExit) as ending:
                enter("", scripts, [mode, "--help"])
            assert ending.value.code == 0
            assert (mode if len(modes) > 1 else script) in capsys.readouterr().out
    enter("", scripts, ["--help"])
    shown = capsys.readouterr().out
    assert all(mode in shown for modes in scripts.values() for mode in modes)
    with pytest.raises(SystemExit, match="no mode 'nowhere'"):
        enter("", scripts, ["nowhere"])
