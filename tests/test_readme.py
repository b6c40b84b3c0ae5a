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
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
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
    assert "tensor" in printed


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def client(llama_folder: Path) -> Any:
    """A client's own model, as transformers loads it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(llama_folder, attn_implementation="eager")


def test_gradients_of_pytorch(client, llama_folder):
    names = {"unmask": unmask, "client": client, "model": unmask.load_model(llama_folder)}
    names["tokens"] = torch.tensor([[5, 6, 7, 8]])
    exec(PYTHON[1], names)
    assert [text.tokens for text in names["recovery"].value.certain] == [(5, 6, 7, 8)]
    assert names["recovery"].status is Status.RECOVERED


def test_a_delta_of_fedavg(client, llama_folder):
    before = {name: weight.detach().clone() for name, weight in client.named_parameters()}
    client(input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
    torch.optim.SGD(client.parameters(), lr=0.01).step()
    names: dict[str, Any] = {"unmask": unmask, "model": unmask.load_model(llama_folder), "before": before}
    names["after"] = {name: weight.detach() for name, weight in client.named_parameters()}
    exec(PYTHON[2], names)
    assert [text.tokens for text in names["recovery"].value.certain] == [(5, 6, 7, 8)]


def test_factors_of_peft(client):
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    model = peft.get_peft_model(client, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    model(input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
    names: dict[str, Any] = {"unmask": unmask, "peft_model": model, "tokenizer": None}
    exec(PYTHON[3], names)
    assert names["recovery"].reason


def test_the_line_of_flower(minilm, tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="the server app needs Flower")
    from unmask.integrations.flower import WatchedGrid

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"grid": None}
    exec(PYTHON[4], names)
    assert isinstance(names["grid"], WatchedGrid)
