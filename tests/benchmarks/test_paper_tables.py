"""The benchmark of the paper's tables, on a tiny GPT-2 and three sentences of our own."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import transformers
from tests.tiny_models import gpt2_config, random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SENTENCES = (
    ("the grey cat sleeps under the old table", 1),
    ("a train leaves at nine every morning", 0),
    ("we walked home along the quiet river", 1),
)


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Threads that share tensors this small only wait for one another, on a busy machine for seconds."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gradients.paper_tables")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of whole words, and a data set."""
    folder = tmp_path_factory.mktemp("tiny")
    words = dict.fromkeys(word for sentence, _ in SENTENCES for word in sentence.split())
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    random_model(transformers.GPT2LMHeadModel, gpt2_config()).save_pretrained(folder)
    (folder / "cola.tsv").write_text("".join(f"{sentence}\t{label}\n" for sentence, label in SENTENCES))
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--model", str(folder), "--data", str(folder), "--sets", "cola", "--texts", "1", "2", *more]


def table_of(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_table_of_exact_texts(benchmark, folder, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    benchmark.main(arguments(folder, "--batches", "2", "--out", str(out)))
    printed = capsys.readouterr().out
    header, _, *rows = table_of(printed)
    assert [row[1:5] for row in rows] == [
        [task, "CoLA", texts, "2"] for task in ("classification", "next token") for texts in ("1", "2")
    ]
    assert {len(row) for row in (header, *rows)} == {11}
    assert all(row[5] == row[6] == "100.0 [100.0, 100.0]" and row[7] == "100.0" for row in rows)
    assert all(row[10] == "–" for row in rows)
    assert "Every batch was recovered exactly" in printed
    assert "torch" in printed
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(results) == len({result["key"] for result in results}) == 8
    assert not any(sentence in out.read_text() for sentence, _ in SENTENCES)  # results are published, texts are not


def test_the_published_numbers_stand_beside_ours(benchmark):
    """As the paper prints them; a batch that it has not is a dash."""
    report = importlib.import_module("gradients.paper_report")
    assert report.PUBLISHED["base", "classification", "sst2", 4] == (100, 92.8)
    assert report.PUBLISHED["base", "classification", "rotten_tomatoes", 64] == (2.8, 1.1)
    assert report.PUBLISHED["base", "next_token", "rotten_tomatoes", 32] == (99.6, 99.4)
    assert report.PUBLISHED["large", "classification", "rotten_tomatoes", 64] == (44.1, 38.1)
    assert ("base", "next_token", "cola", 8) not in report.PUBLISHED
    line = report._line(("base", "classification", "cola", 128), [fake_result()], {"base": "GPT-2"})
    assert line.endswith("| 30.3 / 14.6 |")
    encoders = importlib.import_module("gradients.encoder_tables")
    assert encoders.PUBLISHED["rotten_tomatoes", 8] == 11.4
    assert encoders.PUBLISHED["cola", 1] == 100


def fake_result() -> dict:
    return {"spec": {"seed": 0}, "rouge1": 1.0, "rouge2": 1.0, "exact_rate": 1.0, "seconds": 1.0, "cpu_seconds": 1.0}


def test_classification_has_the_papers_head(benchmark, folder, tmp_path, capsys, monkeypatch):
    heads = []

    def watched(model, texts, **options):
        heads.append(options["head"])
        return observe(model, texts, **options)

    observe = benchmark.observe_gradients
    monkeypatch.setattr(benchmark, "observe_gradients", watched)
    out = tmp_path / "results.jsonl"
    benchmark.main(arguments(folder, "--batches", "1", "--out", str(out)))
    classification, next_token = heads[:2], heads[2:]
    assert next_token == [None, None]
    assert all(0.5e-3 < float(head.std()) < 2e-3 for head in classification)  # 2 × 48 entries of deviation 1e-3
    specs = [json.loads(line)["spec"] for line in out.read_text().splitlines()]
    assert [spec["head_scale"] for spec in specs] == [1e-3, 1e-3, None, None]


def test_results_from_before_heads_had_a_scale_keep_their_key(benchmark):
    old = ("base", "next_token", "cola", 1, 0, 0, False, "0")
    fields = dict(
        zip(("row", "task", "set", "texts", "batch", "seed", "whole_update", "data_sha256"), old, strict=True)
    )
    key = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
    assert benchmark.Spec(*old).key == key
    assert benchmark.Spec(*old, 1e-3).key != key


def test_a_killed_run_goes_on_where_it_stopped(benchmark, folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "results.jsonl"
    asked = arguments(folder, "--batches", "2", "--tasks", "next_token", "--out", str(out))
    measure, runs = benchmark.measure, []

    def killed_at_the_third(*given):
        runs.append(given)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(benchmark, "measure", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(asked)
    first = out.read_text()
    assert len(first.splitlines()) == 2
    out.write_text(first + '{"key": "half a li')
    benchmark.main(asked)  # runs the third again, and the fourth
    assert len(runs) == 5
    assert out.read_text().startswith(first)
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 4
    capsys.readouterr()
    benchmark.main(asked)
    assert len(runs) == 5
    assert len(table_of(capsys.readouterr().out)) == 2 + 2
    benchmark.main([*asked, "--seed", "1"])
    assert len(runs) == 9


def test_the_whole_update_can_be_asked_for(benchmark, folder, capsys, monkeypatch):
    seen = []

    def watched(model, texts, **options):
        seen.append(options["parameters"])
        return observe(model, texts, **options)

    observe = benchmark.observe_gradients
    monkeypatch.setattr(benchmark, "observe_gradients", watched)
    asked = arguments(folder, "--batches", "1", "--tasks", "classification")
    benchmark.main(asked)
    benchmark.main([*asked, "--whole-update"])
    partial, whole = seen[0], seen[-1]
    assert whole is None
    assert {"h.0.attn.c_attn.weight", "h.2.mlp.c_proj.weight", "wte.weight", "wpe.weight"} <= set(partial)
    assert "all parameters" in capsys.readouterr().out


def test_what_was_not_exact_is_told(benchmark, folder, capsys, monkeypatch):
    missed = {"exact_rate": 0.5, "rouge1": 0.75, "rouge2": 0.5, "status": "PARTIAL", "reason": "half is missing"}
    measure = benchmark.measure
    monkeypatch.setattr(benchmark, "measure", lambda *given: measure(*given) | missed)
    benchmark.main(arguments(folder, "--batches", "1", "--tasks", "next_token"))
    printed = capsys.readouterr().out
    assert "50% exact, 0 false; PARTIAL: half is missing" in printed
    assert table_of(printed)[2][5:8] == ["75.0", "50.0", "50.0"]


def test_the_interval_holds_the_mean_and_shrinks(benchmark):
    intervals = importlib.import_module("intervals")
    generator = np.random.default_rng(0)
    few, many = generator.uniform(size=10), generator.uniform(size=1000)
    widths = []
    for values in (few, many):
        low, high = intervals.bootstrap_interval(values, np.random.default_rng(1))
        assert low < values.mean() < high
        widths.append(high - low)
    # The width goes with 1/√n: ten times smaller here; the spread of ten values is itself uncertain by about 0.25.
    assert widths[0] / widths[1] == pytest.approx(10, rel=0.5)
    assert intervals.bootstrap_interval([1.0, 1.0], np.random.default_rng(1)) == (1.0, 1.0)


def test_mistakes_are_told(benchmark, folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--data", str(tmp_path)])
    assert "has no cola.tsv" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="3 usable sentences, a batch of 4"):
        benchmark.main(["--model", str(folder), "--data", str(folder), "--sets", "cola", "--texts", "4"])
    (tmp_path / "cola.tsv").write_text("no label here\n")
    with pytest.raises(SystemExit, match="line 1: expected"):
        benchmark.main(["--data", str(tmp_path), "--sets", "cola"])
