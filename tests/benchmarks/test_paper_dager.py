"""DAGER's tables on tiny models and sentences of our own: cells, batches, rivals, figures, the page."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tests.tiny_models import bert_config, gpt2_config, random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from unmask.models import adapt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SENTENCES = (
    ("the grey cat sleeps under the old table", 1),
    ("a train leaves at nine every morning", 0),
    ("we walked home along the quiet river", 1),
    ("nobody saw the small boat", 0),
    ("her brother paints tall red doors", 1),
)


def word_tokenizer(framed: bool) -> transformers.PreTrainedTokenizerFast:
    words = dict.fromkeys(word for sentence, _ in SENTENCES for word in sentence.split())
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"unk_token": "[UNK]"}
    if framed:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> SimpleNamespace:
    """The modules, with tiny models in place of all, and a folder of data."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("dager", "dager_cells", "dager_models", "dager_batches", "dager_rivals", "dager_figures", "dager_page")
    modules = {name: importlib.import_module(f"paper.{name}") for name in (*names, "dager_summary", "dager_plots")}
    models = modules["dager_models"]

    def subject(place, framed, kind, config):
        tokenizer = word_tokenizer(framed)
        return models.Subject(adapt(random_model(kind, config), tokenizer), tokenizer)

    decoder = lambda place: subject(place, False, transformers.GPT2LMHeadModel, gpt2_config())  # noqa: E731
    encoder = lambda place: subject(place, True, transformers.BertModel, bert_config())  # noqa: E731
    for name, entry in list(models.ENTRIES.items()):
        load = encoder if name in ("bert", "minilm") else decoder
        tiny = models.Entry(entry.label, entry.weights, load, entry.task, entry.needs_gpu, entry.trained)
        monkeypatch.setitem(models.ENTRIES, name, tiny)
    lines = "".join(f"{sentence}\t{label}\n" for sentence, label in SENTENCES)
    for name in ("cola", "sst2", "rotten_tomatoes"):
        (tmp_path / f"{name}.tsv").write_text(lines)
    return SimpleNamespace(**modules, data=tmp_path, out=tmp_path / "paper_dager.jsonl")


def run(room, *cells: str, batches: int = 1, more: tuple[str, ...] = ()) -> list[dict]:
    asked = ["--data", str(room.data), "--out", str(room.out), "--batches", str(batches), *more]
    room.dager.main([*asked, "--cells", *cells])
    return [json.loads(line) for line in room.out.read_text().splitlines()]


# ---- cells


def test_every_published_number_has_cells_or_a_reason(room):
    published = importlib.import_module("published")
    known = set(room.dager_cells.all_cells())
    for cell in published.published_cells():
        found = room.dager_cells.cells_of(cell.model, cell.data, cell.method, cell.texts)
        assert set(found) <= known
        assert found or room.dager_cells.why_not_run(cell.model, cell.method, cell.texts).startswith("not run: ")
    assert room.dager_cells.why_not_run("llama2-7b", "DAGER", 16) == "not run: needs a GPU"
    assert room.dager_cells.why_not_run("gpt2", "LAMP", 8) == "not run: rivals up to 4 texts"


def test_cheap_and_missing_cells_come_first(room):
    cells = room.dager_cells.choose(["gpt2/*/ours"], "cuda", ("cola", "sst2"))
    order = room.dager_cells.in_order(cells, 5)
    assert len(order) == len(set(order)) == 5 * len(cells)
    assert [batch for _, batch in order[: len(cells)]] == [0] * len(cells)
    costs = [cell.cost for cell, _ in order[: len(cells)]]
    assert costs == sorted(costs)
    assert {batch for _, batch in order[-2 * len(cells) :]} == {3, 4}


def test_a_core_gets_no_cells_that_need_a_gpu(room):
    names = {cell.name for cell in room.dager_cells.choose([], "cpu", ("cola", "sst2", "rotten_tomatoes"))}
    assert "gpt2/cola/8/ours" in names
    assert not [name for name in names if name.startswith(("llama", "gpt2-large"))]
    every = {cell.name for cell in room.dager_cells.choose([], "cuda", ("cola", "sst2", "rotten_tomatoes"))}
    assert "llama2-7b/rotten_tomatoes/128/ours" in every


# ---- batches


def test_batches_are_exact_and_not_run_again(room, capsys):
    room_cells = ("gpt2/cola/[12]/ours", "gpt2/cola/1/dager", "gpt2-nexttoken/*", "bert/sst2/1/ours")
    found = run(room, *room_cells[:2], room_cells[3], batches=2)
    assert len(found) == len({one["key"] for one in found}) == 8
    ours = [one for one in found if one["spec"]["attack"] == "ours"]
    assert all(one["exact"] == one["num_texts"] and one["false_certain"] == 0 for one in ours)
    assert all(one["rouge2"] == 1 and one["cpu_seconds"] > 0 and "torch" in one["machine"] for one in ours)
    assert not any(sentence in room.out.read_text() for sentence, _ in SENTENCES)  # texts are not published
    before = room.out.read_text()
    room.out.write_text(before + '{"key": "half a li')
    assert run(room, *room_cells[:2], room_cells[3], batches=2) == found
    assert "8 batches were asked for, 0 are missing" in capsys.readouterr().out


def test_the_time_ends_a_run(room, capsys):
    run(room, "gpt2/cola/[12]/ours", more=("--seconds", "1e-9"))
    assert "the time is up: 2 batches are left" in capsys.readouterr().out
    room.dager.main(["--data", str(room.data), "--list", "--cells", "gpt2/cola/[12]/ours"])
    assert capsys.readouterr().out.split() == ["gpt2/cola/1/ours", "gpt2/cola/2/ours"]


def test_a_batch_that_takes_too_long_counts_nothing_and_is_tried_again(room, monkeypatch, capsys):
    def forever(*_):
        while True:
            pass

    measure = room.dager.measure
    monkeypatch.setattr(room.dager, "measure", forever)
    (stopped,) = run(room, "gpt2/cola/1/ours", more=("--batch-seconds", "0.05"))
    assert (stopped["status"], stopped["rouge1"], stopped["num_texts"]) == ("STOPPED", 0, 1)
    assert len(run(room, "gpt2/cola/1/ours", more=("--batch-seconds", "0.05"))) == 1
    monkeypatch.setattr(room.dager, "measure", measure)
    assert run(room, "gpt2/cola/1/ours")[-1]["rouge1"] == 1
    (summary,) = room.dager_summary.summarise(room.dager_summary.read_results(room.data))
    assert summary.rouge() == (100, 100)


def test_a_model_whose_weights_are_not_here_is_passed_over(room, monkeypatch, capsys):
    def missing(_):
        raise OSError("no such weights\nat all")

    entry = room.dager_models.ENTRIES["gpt2"]
    monkeypatch.setitem(room.dager_models.ENTRIES, "gpt2", replace(entry, load=missing))
    (found,) = run(room, "gpt2/cola/1/ours", "minilm/cola/1/ours")
    assert found["spec"]["model"] == "minilm"
    assert "gpt2/cola/1/ours is passed over: no such weights\n" in capsys.readouterr().out


def test_a_model_is_trained_on_texts_that_are_not_attacked(room):
    attacked, trained = room.dager_models.split_for_training(SENTENCES)
    assert len(attacked) + len(trained) == len(SENTENCES)
    assert not {sentence for sentence, _ in attacked} & set(trained)
    subject = room.dager_models.ENTRIES["gpt2"].load(room.dager_models.Place())
    before = subject.model.parameter("h.0.mlp.c_fc.weight").detach().clone()
    losses = room.dager_models.fine_tune(subject, trained, num_steps=4)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert not before.equal(subject.model.parameter("h.0.mlp.c_fc.weight"))


def test_a_start_token_stands_in_front(room):
    subject = room.dager_models.Subject(None, word_tokenizer(True), start=1)
    tokens = subject.encode("the grey cat")
    assert tokens[0] == 1
    assert 2 not in tokens
    assert subject.decode(tokens) == "the grey cat"


def test_mistakes_are_told(room, tmp_path, capsys):
    with pytest.raises(SystemExit):
        room.dager.main(["--data", str(tmp_path / "nowhere")])
    assert "has no cola.tsv" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"holds no paper_dager\*.jsonl"):
        room.dager.main(["--only-page", "--results", str(tmp_path / "empty"), "--page", str(tmp_path / "page.md")])


# ---- rivals, figures and the page


@pytest.mark.slow
def test_rivals_figures_and_the_page(room, monkeypatch):
    monkeypatch.setattr(room.dager_rivals, "CPU_TAG", room.dager_rivals.Tag(num_steps=2, starts=((0.1, 0.01),)))
    tiny = room.dager_rivals.Lamp(num_steps=3, num_moves=4, num_candidates=2, move_every=2, burn_in=0, rates=(0.01,))
    monkeypatch.setattr(room.dager_rivals, "CPU_LAMP", tiny)
    monkeypatch.setattr(room.dager_rivals, "PRIOR", "no-such-model")
    monkeypatch.setattr(room.dager_figures, "ENCODER_LENGTHS", (4, 5))
    monkeypatch.setattr(room.dager_figures, "TEXTS_OF_FIGURE_2", 3)
    found = run(room, "gpt2/cola/1/ours", "gpt2/cola/1/dager", "minilm/cola/1/*", "fig2/*", "fig4/*")
    rivals = {one["spec"]["attack"]: one for one in found if one["spec"].get("attack") in ("tag", "lamp")}
    assert set(rivals) == {"tag", "lamp"}
    assert "bigrams" in rivals["lamp"]["prior"]
    assert "num_steps=3" in rivals["lamp"]["spec"]["settings"]
    assert all(one["certain"] == one["false_certain"] == 0 for one in rivals.values())
    page = room.data / "page.md"
    room.dager.main(["--only-page", "--results", str(room.data), "--page", str(page)])
    text = page.read_text()
    assert (room.data / "paper_dager_fig4.svg").is_file()
    assert "](paper_dager_fig2.svg)" in text
    row = next(line for line in text.splitlines() if line.startswith("| GPT-2 | CoLA | 1 |"))
    assert "| 73.3 / 43.3 | not run: no time left on a GPU | 100.0 / 100.0 |" in row
    assert row.count("100.0 / 100.0 (1)") >= 1
    assert text.count("not run: ") > 100
    assert "0 falsely certain" in text
    for table in ("Table 1", "Table 2", "Table 3", "Table 5", "Table 6", "Figure 2", "Figure 3", "Figure 4"):
        assert f"{table}: " in text
    assert all(one["pass_first"][-1] >= one["found_first"][-1] for one in found if one["spec"].get("figure") == "fig2")


def test_without_the_cut_large_batches_count_nothing(room):
    one = {"rouge1": 1.0, "rouge2": 0.5, "width": 8, "exact": 1, "num_texts": 1}
    cell = room.dager_cells.Cell("gpt2", "cola", 16, "dager")
    summary = room.dager_summary.Summary(cell, "", "core", ({**one, "tokens": 8}, {**one, "tokens": 9}))
    assert summary.rouge() == (100, 50)
    assert summary.rouge_without_cut() == (50, 25)


def test_tables_of_texts_count_every_batch_and_of_two_runs_the_worse(room):
    cell = room.dager_cells.Cell("bert", "cola", 4, "ours")

    def run(batch: int, exact: int):
        return {"spec": {"batch": batch}, "exact": exact, "rouge2": exact / 4}

    core = room.dager_summary.Summary(cell, "", "core", (run(0, 3),))
    gpu = room.dager_summary.Summary(cell, "", "NVIDIA H200", (run(0, 4), run(1, 4)))
    less = room.dager_summary.Summary(cell, "a smaller budget", "core", (run(2, 1),))
    both = room.dager_summary.every_batch([core, gpu, less], cell)
    assert [one["exact"] for one in both.results] == [3, 4]
    assert both.machine == "core; NVIDIA H200"
    assert room.dager_summary.every_batch([gpu], room.dager_cells.Cell("bert", "cola", 2, "ours")) is None


def test_rivals_on_a_gpu_stand_in_the_table(room):
    cell = room.dager_cells.Cell("gpt2", "cola", 1, "lamp")
    core = room.dager_summary.Summary(cell, "few steps", "core", ({}, {}))
    gpu = room.dager_summary.Summary(cell, "all steps", "NVIDIA H200", ({"device": "cuda"},))
    assert room.dager_summary.best([core, gpu], cell) is gpu
    assert room.dager_summary.best([core], cell) is core
    assert room.dager_summary.best([core], room.dager_cells.Cell("gpt2", "cola", 2, "lamp")) is None
