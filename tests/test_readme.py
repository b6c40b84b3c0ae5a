"""The README: short, its links lead somewhere, its commands print what it shows, its Python runs on real weights."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.audit.made import save_llama

import unmask
from unmask.audit.plan import load_plan
from unmask.recovery import Status

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = [
    "The biopsy was positive, and the treatment starts on Monday.",
    "The spare key lies under the blue flower pot.",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


PYTHON = blocks("python")
NAME = "smollm2-135m"


def test_a_newcomer_finishes_it():
    assert len(README.splitlines()) <= 180


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", README) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_its_plan_loads(tmp_path):
    (plan,) = blocks("toml")
    (tmp_path / "plan.toml").write_text(plan)
    (tmp_path / "notes.txt").write_text("\n".join(f"note number {number}" for number in range(8)))
    assert len(load_plan(tmp_path / "plan.toml").cases) == 12


def test_its_two_commands_print_what_it_shows(smollm2, tmp_path, commands):
    (block,) = (block for block in blocks("bash") if "unmask recover" in block)
    (shown,) = blocks("text")
    environment = {**os.environ, "COLUMNS": "80", "PATH": f"{commands}:{os.environ['PATH']}"}
    done = subprocess.run(block, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [line for line in shown.splitlines() if line not in done.stdout]


def test_its_first_python_runs(smollm2, capsys, monkeypatch):
    monkeypatch.setattr(unmask, "load_model", {"smollm2-135m": smollm2}.__getitem__)
    names: dict[str, Any] = {}
    exec(PYTHON[0], names)
    assert names["recovery"].status is Status.RECOVERED
    assert sorted(text.text for text in names["recovery"].value.texts) == sorted(TEXTS)
    printed = capsys.readouterr().out
    assert printed.count("RECOVERED") == 2


def test_its_captured_updates_stand_alone(tmp_path, monkeypatch):
    """Nothing but what the block itself defines: three kinds of update, each read whole."""
    pytest.importorskip("peft", reason="LoRA needs peft")
    load, model = unmask.load_model, unmask.load_model(save_llama(tmp_path))
    monkeypatch.setattr(unmask, "load_model", lambda source, **rest: model if source == NAME else load(source, **rest))
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(PYTHON[1].replace(TEXTS[1], "w5 w6 w7 w8"), names)
    for recovery in (names["recovery"], names["of_fedavg"], names["of_peft"]):
        assert recovery.status is Status.RECOVERED, recovery.reason
        assert [text.tokens for text in recovery.value.certain] == [tuple(names["tokens"][0].tolist())]
