"""The benchmark of prompts read from hidden states, on a tiny Llama with a tokenizer of words, and the front door."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from tests.tiny_models import llama_sizes, random_model, word_tokenizer

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.models import Model, adapt
from unmask.protocols.hidden import observe_hidden

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Threads that share tensors this small only wait for one another, on a busy machine for seconds."""


@pytest.fixture(scope="module")
def model() -> Model:
    hf = random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama_sizes()))
    return adapt(hf, word_tokenizer())


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, model: Model) -> ModuleType:
    """The benchmark with the tiny model."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("outputs.prompts")
    monkeypatch.setattr(module, "load_model", lambda name, device: model)
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six texts of eight words, behind one that is too short."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(5, 500, (6, 8), generator=generator).tolist()
    lines = ["w7 w8\t0", *(" ".join(f"w{number}" for number in row) + "\t1" for row in numbers)]
    path = tmp_path / "texts.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(benchmark: ModuleType, out: Path, *arguments: str) -> list[dict]:
    benchmark.main([*arguments, "--out", str(out)])
    document = json.loads(out.read_text())
    assert {"machine", "mode", "seed", "arguments", "rows"} == document.keys()
    return document["rows"]


def test_exact(benchmark: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ("--layers", "2", "--prompts", "2", "--random", "1", "--tokens", "8", "--data", str(data))
    rows = run(benchmark, tmp_path / "out.json", "exact", *options)
    assert [(row["layer"], row["kind"]) for row in rows] == [(2, "text"), (2, "random")]
    for row in rows:
        assert row["exact"] == row["prompts"]
        assert row["right"] == row["certain"] == 1
        assert row["certain but false"] == []
        assert row["worst residual"] < 1e-4 < row["nearest rejected"]
    assert capsys.readouterr().out.count("\n| ") == 4  # header, line, two rows


def test_against_gradient(benchmark: ModuleType, data: Path, tmp_path: Path) -> None:
    options = ("--layers", "2", "--prompts", "1", "--tokens", "8", "--data", str(data), "--baseline-positions", "3")
    (row,) = run(benchmark, tmp_path / "out.json", "against-gradient", *options, "--baseline-steps", "16")
    assert row["ours found"] == 1
    assert row["gradient found"] == 1  # 16 steps of 32 tokens are the whole vocabulary
    assert row["gradient positions"] == 3
    assert {trial["step"] for trial in row["step sizes tried"]} == {0.5, 1.0, 2.0}


def test_coarse(benchmark: ModuleType, data: Path, tmp_path: Path) -> None:
    options = ("--layers", "2", "--prompts", "1", "--tokens", "4", "--data", str(data))
    rows = run(benchmark, tmp_path / "out.json", "coarse", *options)
    assert [row["states"] for row in rows] == list(benchmark.DISTORTIONS)
    assert rows[0]["right"] == 1  # bfloat16
    assert all(row["certain but false"] == [] for row in rows)


def test_control(benchmark: ModuleType, data: Path, tmp_path: Path) -> None:
    options = ("--layers", "2", "--prompts", "2", "--tokens", "4", "--data", str(data))
    rows = run(benchmark, tmp_path / "out.json", "control", *options)
    assert [row["prompts"] for row in rows] == [2]
    assert all("RECOVERED" not in row["status"] and row["certain"] == 0 for row in rows)


def test_invented_prompts_are_long_enough(benchmark: ModuleType, model: Model) -> None:
    options = argparse.Namespace(data=None, skip=1, tokens=30)
    assert [len(prompt) for prompt in benchmark.texts_of(model, options, 3)] == [30, 30, 30]


def test_too_few_texts_are_refused(benchmark: ModuleType, model: Model, data: Path) -> None:
    with pytest.raises(SystemExit, match="6 texts of 8 tokens; 7 were wanted"):
        benchmark.texts_of(model, argparse.Namespace(data=data, skip=0, tokens=8), 7)


def test_the_baseline_differentiates_the_state_that_is_seen(
    benchmark: ModuleType, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = importlib.import_module("outputs.gradient_search")
    states = observe_hidden(model, [[7, 8, 9]], layer=3).states[0]
    text = search.followed(search.followed(Continuation.start(model, 3), 7), 8)
    row = search.vocabulary_rows(text)[9].detach()
    # Two orders of the same sums.
    torch.testing.assert_close(search.differentiable_state(text, row), states[2], rtol=1e-4, atol=1e-5)
    assert float(search.state_gradient(text, row, states[2]).norm()) < 1e-3
    assert float(search.state_gradient(text, 2 * row, states[2]).norm()) > 1e-1
