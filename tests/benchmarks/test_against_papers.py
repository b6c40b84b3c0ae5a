"""The table against the papers, on tiny models: the rival is tuned, both updates are measured, rows are kept."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.tiny_models import bert_config, gpt2_config, random_model
from transformers import BertModel, GPT2LMHeadModel

from unmask.models import Model, adapt
from unmask.protocols import observe_gradients
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
START, END = 1, 2


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Threads that share tensors this small only wait for one another, on a busy machine for seconds."""


class Framing:
    """A tokenizer that only knows its frame."""

    eos_token_id, sep_token_id, cls_token_id = None, END, START
    all_special_ids = (START, END)

    def __call__(self, text: str, **_: object) -> dict:
        return {"input_ids": [START, END]}

    def decode(self, tokens, **_: object) -> str:
        return " ".join(f"w{token}" for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return {f"www{letters[i // 26]}{letters[i % 26]}": i for i in range(3, 60)}


@pytest.fixture(scope="module")
def encoder() -> Model:
    return adapt(random_model(BertModel, bert_config()), Framing())


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, encoder: Model) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("baselines.against_papers")
    decoder = adapt(random_model(GPT2LMHeadModel, gpt2_config()))
    monkeypatch.setattr(module, "gpt2_model", lambda: decoder)
    monkeypatch.setattr(module, "encoder_model", lambda: encoder)
    return module


def run(benchmark: ModuleType, out: Path, *arguments: str) -> dict[str, dict]:
    benchmark.main([*arguments, "--out", str(out), "--repeats", "1"])
    return {row["cell"]: row for row in json.loads(out.read_text())["rows"]}


def test_decoders_on_both_updates_and_rows_are_replaced(benchmark, tmp_path, capsys, monkeypatch):
    # Texts of the benchmark have 12 to 18 tokens, which is more than the tiny model is wide.
    monkeypatch.setattr(
        benchmark, "zipf_batch", lambda n, *_, seed: [[10 * i + j for j in range(3, 8)] for i in range(n)]
    )
    out = tmp_path / "out.json"
    rows = run(benchmark, out, "--only", "decoders", "--texts", "1", "2")
    assert list(rows) == ["decoders, 1 texts", "decoders, 2 texts"]
    for num_texts, row in enumerate(rows.values(), start=1):
        assert set(row["ours"]) == set(row["ratio"]) == {benchmark.OWN, benchmark.WHOLE}
        assert row["ours"][benchmark.WHOLE]["exact"] == row["paper"]["exact"] == num_texts
        assert all(one["false_certain"] == 0 for one in (*row["ours"].values(), row["paper"]))
        assert row["paper_tried"][0]["exact"] <= num_texts
        assert "torch" in row["machine"]
        assert len(row["load"]) == 3
    again = run(benchmark, out, "--only", "decoders", "--texts", "2")
    assert list(again) == list(rows)
    printed = capsys.readouterr().out
    assert "## Against the papers" in printed
    assert "others used it too" in printed
    benchmark.main(["--show", "--out", str(out)])
    assert capsys.readouterr().out.count("DAGER, GPT-2 shape") == 2


def test_the_head_of_decoders_is_the_papers(benchmark, tmp_path, capsys, monkeypatch):
    heads = []

    def watched(model, texts, **options):
        heads.append(options["head"])
        return observe_gradients(model, texts, **options)

    monkeypatch.setattr(benchmark, "observe_gradients", watched)
    monkeypatch.setattr(benchmark, "zipf_batch", lambda *_, seed: [[3, 4, 5, 6]])
    run(benchmark, tmp_path / "out.json", "--only", "decoders", "--texts", "1")
    assert 0.5e-3 < float(heads[0].std()) < 2e-3


def test_a_sweep_counts_the_best_run(benchmark, monkeypatch):
    class Setting:
        rank_margin, token_tolerance, sequence_tolerance = 20, 1e-5, 1e-3

        def __init__(self, rank_tolerance, texts):
            self.rank_tolerance, self.texts, self.runs = rank_tolerance, texts, 0

        def __call__(self, evidence, model):
            self.runs += 1
            texts = tuple(RecoveredText(text, "", False, 0.0) for text in self.texts)
            return Recovery(RecoveredTexts(texts), Status.PARTIAL, "", Certificate.none(""), Cost())

    sweep = [Setting(None, []), Setting(1e-9, [(1, 2)]), Setting(1e-8, [(1, 2), (3, 4)]), Setting(1e-7, [])]
    best, (_, recovery), tried = benchmark.tune(None, None, [[1, 2], [3, 4]], sweep)
    assert best is sweep[2]
    assert recovery.value.expand() == [(1, 2), (3, 4)]
    assert [one["exact"] for one in tried] == [0, 1, 2]
    assert sweep[3].runs == 0  # nothing can be better


def test_encoders(benchmark, tmp_path, capsys):
    rows = run(benchmark, tmp_path / "out.json", "--only", "encoders", "--encoders", "2x5")
    (row,) = rows.values()
    assert row["paper"]["exact"] == 2
    assert row["products"] >= 2**3
    assert row["ours"][benchmark.WHOLE]["false_certain"] == 0


@pytest.mark.slow
def test_noise_is_met_with_swept_tolerances(benchmark, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "word_salad", lambda *_, **__: [[START, 10, 11, 12, END], [START, 20, 21, 22, END]])
    rows = run(benchmark, tmp_path / "out.json", "--only", "noise", "--sigmas", "0", "1e-6")
    clean, noisy = rows["noise, σ = 0"], rows["noise, σ = 1e-06"]
    assert clean["tuned"]["recall"] == clean["tuned"]["precision"] == 1
    assert clean["tuned"]["exact"] == 2
    assert clean["authors"]["recall"] == clean["authors"]["precision"] == 1
    assert clean["authors"]["exact"] == 2
    assert noisy["authors"]["recall"] < 1  # τ₁ = 1e-5 refuses what noise moved
    assert noisy["tuned"]["recall"] == noisy["tuned"]["precision"] == 1
    assert noisy["tuned"]["exact"] == 2
    assert "tuned by score" in capsys.readouterr().out


def test_queries_count_the_papers_best_probes(benchmark, tmp_path, capsys):
    (row,) = run(benchmark, tmp_path / "out.json", "--only", "queries", "--widths", "8").values()
    sparse = row["errors"]["float64, zeros in v"]
    assert sparse["paper_queries"] == 8 + 64
    assert sparse["paper"] < 1e-12
    assert sparse["ours"] < 1e-12


def test_algorithm_1_is_swept_as_it_runs(benchmark, encoder):
    """Token sets from distances that are computed once are those of the attack itself."""
    noise = importlib.import_module("baselines.against_noise")
    texts = [[START, 10, 11, 12, END], [START, 20, 21, END]]
    evidence = observe_gradients(encoder, texts, task="classification")
    for tolerance in (1e-5, 1e-3, 0.5):
        attack = noise.Dager(token_tolerance=tolerance, max_length=7, max_products=1)
        (distances,) = noise.token_distances(evidence, encoder, [attack], 7)
        assert noise.passing(distances, tolerance) == set(attack(evidence, encoder).value.token_set)
    assert torch.is_tensor(distances)
