"""The benchmark of encoders, on a tiny BERT and invented sentences."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from tests.tiny_models import bert_config, random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from unmask import observe_gradients
from unmask.attacks.baselines.dager import Dager
from unmask.models import Model, adapt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SENTENCES = (
    ("grey cats sleep under every table", 1),
    ("one train leaves before nine", 0),
    ("they walked home along quiet rivers", 1),
    ("nobody answered her second letter today", 0),
)
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Threads that share tensors this small only wait for one another, on a busy machine for seconds."""


@pytest.fixture(scope="module")
def model() -> Model:
    """A BERT with a tokenizer of whole words."""
    words = dict.fromkeys(word for sentence, _ in SENTENCES for word in sentence.split())
    vocabulary = {word: number for number, word in enumerate([*SPECIALS, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    frame = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=frame)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    return adapt(random_model(transformers.BertModel, bert_config(vocab_size=len(vocabulary))), fast)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, model: Model) -> ModuleType:
    """The benchmark with the tiny model as MiniLM."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cases = importlib.import_module("gradients.encoder_cases")
    monkeypatch.setitem(cases.ROWS, "minilm", cases.Row("tiny", lambda: model))
    monkeypatch.setitem(importlib.import_module("gradients.encoder_costs").ROOM, "minilm", model.width - 6)
    return importlib.import_module("gradients.encoders")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "cola.tsv").write_text("".join(f"{sentence}\t{label}\n" for sentence, label in SENTENCES))
    return folder


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def table_of(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("|") and "--:" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def exact_arguments(data: Path, out: Path, *more: str) -> list[str]:
    wanted = ["--mode", "exact", "--texts", "2", "--batches", "2", "--tokens", "3", "20"]
    return [*wanted, "--data", str(data / "cola.tsv"), "--out", str(out), *more]


@pytest.mark.slow
def test_exact_texts_of_every_pooling_and_update(benchmark, data, tmp_path, capsys):
    out = tmp_path / "exact.jsonl"
    benchmark.main(exact_arguments(data, out))
    printed = capsys.readouterr().out
    header, *rows = table_of(printed)
    assert [row[2:6] for row in rows] == [
        ["2", pooling, keep, "2"] for pooling in ("mean", "first") for keep in ("all", "encoder.")
    ]
    assert all(len(row) == len(header) for row in rows)
    assert all(row[6:9] == ["4/4", "100.0", "0"] for row in rows)
    assert "torch" in printed
    results = lines_of(out)
    assert len({result["key"] for result in results}) == 8
    assert all(result["steps"] >= 1 and result["false_certain"] == 0 for result in results)
    assert not any(word in out.read_text() for word in ("sleep", "rivers"))  # results are published, texts are not


def test_a_killed_run_goes_on_where_it_stopped(benchmark, data, tmp_path, monkeypatch, capsys):
    tables = importlib.import_module("gradients.encoder_tables")
    measure, runs = tables.measure, []

    def killed_at_the_third(*given):
        runs.append(given)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(tables, "measure", killed_at_the_third)
    out = tmp_path / "exact.jsonl"
    asked = exact_arguments(data, out, "--poolings", "first")
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(asked)
    assert len(lines_of(out)) == 2
    benchmark.main(asked)
    assert len(runs) == 5
    assert len(lines_of(out)) == 4
    benchmark.main([*asked, "--max-anchors", "50"])  # another setting is another result
    assert len(runs) == 9


def test_without_data_texts_are_invented_and_it_is_told(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "SHARED_DATA", tmp_path)
    wanted = ["--mode", "exact", "--texts", "1", "--batches", "1", "--tokens", "4", "6", "--keep", "all"]
    benchmark.main([*wanted, "--poolings", "mean", "--out", str(tmp_path / "exact.jsonl")])
    printed = capsys.readouterr().out
    assert "INVENTED, as there is no data file" in printed
    assert table_of(printed)[1][1] == "invented"


def test_false_and_missing_texts_are_told(benchmark, data, tmp_path, monkeypatch, capsys):
    tables = importlib.import_module("gradients.encoder_tables")
    measure = tables.measure
    bad = {"exact": 1, "certain_exact": 1, "false_certain": 1, "status": "PARTIAL", "reason": "half is missing"}
    monkeypatch.setattr(tables, "measure", lambda *given: measure(*given) | bad | {"code": "other"})
    benchmark.main(exact_arguments(data, tmp_path / "x.jsonl", "--poolings", "mean", "--keep", "all"))
    printed = capsys.readouterr().out
    assert table_of(printed)[1][6:9] == ["2/4", "50.0", "2"]
    assert "- FALSE: minilm, cola, 2 texts, mean, all, batch 0: 1 texts" in printed
    assert "1 of 2 exact, 1 certain; PARTIAL: half is missing" in printed
    assert "2 of 2 batches were measured with another version of the code" in printed


def test_the_papers_rows(benchmark, data, tmp_path, capsys):
    wanted = ["--mode", "paper", "--rows", "minilm", "--sets", "cola", "--texts", "1", "2", "--batches", "1"]
    benchmark.main([*wanted, "--data", str(data), "--out", str(tmp_path / "paper.jsonl")])
    rows = table_of(capsys.readouterr().out)[1:]
    assert [row[1:5] for row in rows] == [["CoLA", texts, "first", "all"] for texts in ("1", "2")]
    assert all(row[9:12] == ["100.0", "100.0", "100.0"] for row in rows)  # ours, ours, and the paper's Table 1


def test_invented_texts_are_what_the_tokenizer_makes_of_them(benchmark, model):
    cases = importlib.import_module("gradients.encoder_cases")
    texts = cases.word_salad(model, 5, 4, 7, seed=3)
    assert texts == cases.word_salad(model, 5, 4, 7, seed=3) != cases.word_salad(model, 5, 4, 7, seed=4)
    for text in texts:
        assert 4 <= len(text) <= 7
        assert model.encode(model.tokenizer.decode(text, skip_special_tokens=True)) == text
    words = [token for text in cases.word_salad(model, 3, 7, 7, seed=0, distinct=True) for token in text[1:-1]]
    assert len(set(words)) == len(words) == 15


@pytest.mark.parametrize("lengths", [(5, 5), (4, 6, 6)])
def test_products_are_counted_as_algorithm_3_checks_them(benchmark, model, lengths):
    algorithm3 = importlib.import_module("baselines.algorithm3")
    cases = importlib.import_module("gradients.encoder_cases")
    words = iter(cases.word_salad(model, 1, 22, 22, seed=1, distinct=True)[0][1:-1])
    first, last = model.frame_tokens
    texts = [[first, *(next(words) for _ in range(length - 2)), last] for length in lengths]
    evidence = observe_gradients(model, texts, task="classification")
    counted = algorithm3.count(evidence, model, texts, timed=True)
    assert counted.tally.held == len(texts)
    assert counted.tally.least_seconds > counted.tally.setup_seconds > 0

    checked = []

    def watch(stage, done, total):
        if stage == "checking products":
            checked.append(total)

    found = Dager(token_tolerance=counted.token_tolerance)(evidence, model, watch)
    assert sorted(map(list, found.value.expand())) == sorted(texts)
    assert counted.tally.needed == counted.tally.checked == checked[-1]


@pytest.mark.slow
def test_algorithm_3_is_measured_or_bounded_and_never_both(benchmark, tmp_path, capsys):
    out = tmp_path / "dager.jsonl"
    wanted = ["--mode", "against-dager", "--rows", "minilm", "--distinct", "--texts", "2", "--lengths", "5"]
    benchmark.main([*wanted, "--repeats", "2", "--out", str(out)])
    row = table_of(capsys.readouterr().out)[1]
    measured = lines_of(out)[0]
    assert measured["dager"]["runs"] == 2
    assert measured["ours"]["runs"] == 3
    assert measured["ratio"] == measured["dager"]["seconds"] / measured["ours"]["seconds"]
    assert measured["dager_seconds_at_least"] is measured["ratio_at_least"] is None
    assert row[4:7] == ["8", "2/2", "2/2"]
    benchmark.main([*wanted, "--limit", "0", "--out", str(out)])
    row = table_of(capsys.readouterr().out)[1]
    bounded = lines_of(out)[1]
    assert bounded["dager"] is bounded["ratio"] is None
    assert bounded["dager_seconds_at_least"] > 0
    assert row[6] == "not run"
    assert row[10].startswith("≥")
    assert row[11].startswith("≥")


def test_slopes_are_printed_and_written_once(benchmark, tmp_path, capsys):
    out = tmp_path / "slopes.jsonl"
    wanted = ["--mode", "slopes", "--rows", "minilm", "--distinct", "--texts", "1", "2", "--lengths", "4", "5"]
    wanted += ["--fixed-texts", "2", "--fixed-length", "5", "--batches", "1", "--out", str(out)]
    benchmark.main(wanted)
    printed = capsys.readouterr().out
    assert "log-log slopes in texts: seconds" in printed
    assert "log-log slopes in length: seconds" in printed
    written = lines_of(out)
    assert [line["axis"] for line in written if "slopes" in line] == ["texts", "length"]
    assert len(written) == 3 + 2  # two texts of five tokens are a cell of both
    benchmark.main(wanted)
    assert lines_of(out) == written
    fit = importlib.import_module("gradients.encoder_costs").log_log_slope
    assert fit([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert fit([2], [1.0]) is None


def test_mistakes_are_told(benchmark, tmp_path, capsys):
    for wanted, told in (
        (["--mode", "paper", "--data", str(tmp_path)], "has no cola.tsv"),
        (["--mode", "exact", "--data", str(tmp_path / "none.tsv")], "is no file"),
        (["--mode", "slopes", "--texts", "0"], "must be at least 1"),
        (["--mode", "against-dager", "--lengths", "2"], "3 tokens at least"),
    ):
        with pytest.raises(SystemExit):
            benchmark.main(wanted)
        assert told in capsys.readouterr().err
