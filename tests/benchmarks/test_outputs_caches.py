"""The benchmark of caches and of known beginnings, on a tiny Llama with a tokenizer of words."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from tests.tiny_models import llama_sizes, random_model, word_tokenizer

from unmask.models import Model, adapt

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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("outputs.caches")
    monkeypatch.setattr(module, "load_model", lambda name, device: model)
    monkeypatch.setattr(module, "BEGINNING", "w7 w8 w9")
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    numbers = torch.randint(5, 500, (3, 6), generator=torch.Generator().manual_seed(1)).tolist()
    path = tmp_path / "texts.tsv"
    path.write_text("\n".join(" ".join(f"w{number}" for number in row) + "\t1" for row in numbers) + "\n")
    return path


def run(benchmark: ModuleType, tmp_path: Path, data: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "out.json"
    shared = ["--data", str(data), "--prompts", "2", "--tokens", "6", "--layers", "1", "--out", str(out)]
    benchmark.main([*arguments, *shared])
    return json.loads(out.read_text())["rows"]


def test_caches_are_counted_and_resumed(benchmark, tmp_path, data):
    (row,) = run(benchmark, tmp_path, data, "caches", "--storages", "int8")
    assert (row["prompts exact"], row["false texts"], row["block"]) == ("2 of 2", 0, 1)
    rows = run(benchmark, tmp_path, data, "caches", "--storages", "int8", "float32", "--resume")
    assert rows[0] == row
    assert [each["storage"] for each in rows] == ["int8", "float32"]


def test_parts_of_a_cache(benchmark, tmp_path, data):
    rows = run(benchmark, tmp_path, data, "cache-parts", "--storages", "float32")
    assert [(row["seen"], row["heads"]) for row in rows] == [("keys", 2), ("values", 2), ("half the heads", 1)]
    assert not any(row["false tokens"] for row in rows)


def test_nothing_is_certain_of_spoiled_caches(benchmark, tmp_path, data):
    rows = run(benchmark, tmp_path, data, "cache-control", "--max-candidates", "32")
    assert len(rows) == 8
    assert not any(row["certain tokens"] for row in rows)


def test_a_known_beginning_is_not_counted(benchmark, tmp_path, data):
    rows = run(benchmark, tmp_path, data, "known-beginning")
    assert [row["known"] for row in rows] == ["nothing", "the beginning", "a wrong beginning"]
    assert rows[1]["prompts exact"] == "2 of 2"
    assert not any(row["false tokens"] for row in rows)
