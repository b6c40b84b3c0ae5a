"""The benchmark of stored embeddings, on a tiny BERT with a tokenizer of words."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from tests.tiny_models import bert_config, random_model, word_tokenizer

from unmask.models import Model, adapt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def model() -> Model:
    hf = random_model(transformers.BertModel, bert_config(num_hidden_layers=1))
    return adapt(hf, word_tokenizer())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The effects of the model's tokens are fitted once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, model: Model, cache: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("UNMASK_CACHE", str(cache))
    module = importlib.import_module("outputs.vectors")
    monkeypatch.setattr(module, "load_model", lambda name, device: model)
    return module


def run(benchmark: ModuleType, tmp_path: Path, mode: str, *arguments: str) -> list[dict]:
    numbers = torch.randint(5, 500, (2, 3), generator=torch.Generator().manual_seed(1)).tolist()
    data, out = tmp_path / "texts.tsv", tmp_path / "out.json"
    data.write_text("\n".join(" ".join(f"w{number}" for number in row) + "\t1" for row in numbers) + "\n")
    attack = "embedding:max_texts=100,max_attempts=1,language=none"
    shared = ["--data", str(data), "--texts", "1", "--lengths", "3-3", "--attack", attack, "--out", str(out)]
    benchmark.main([mode, *arguments, *shared])
    return json.loads(out.read_text())["rows"]


def test_texts_are_counted_and_rows_resumed(benchmark, tmp_path):
    (row,) = run(benchmark, tmp_path, "vectors", "--storages", "int8")
    assert (row["texts"], row["false"], row["stored as"]) == (1, 0, "int8")
    assert 0 <= row["certain"] <= row["exact"] <= 1
    rows = run(benchmark, tmp_path, "vectors", "--storages", "int8", "float32", "--resume")
    assert rows[0] == row
    assert len(rows) == 2


def test_controls_claim_nothing(benchmark, tmp_path):
    rows = run(benchmark, tmp_path, "vector-control")
    assert [row["vectors"] for row in rows] == list(benchmark.CONTROLS)
    assert not any(row["claimed"] for row in rows)


@pytest.mark.slow
def test_rates_stand_side_by_side(benchmark, tmp_path):
    (row,) = run(benchmark, tmp_path, "vector-rate")
    assert 0 < row["share"] == pytest.approx(row["search, texts/s"] / row["alone, texts/s"])


def test_overlap_counts_tokens_without_their_frame(benchmark):
    assert benchmark.overlap((1, 5, 6, 6, 2), (1, 6, 5, 7, 2), (1, 2)) == pytest.approx(4 / 6)
    assert benchmark.overlap((), (1, 6, 2), (1, 2)) == 0
