"""Claims that are stored and compared: equal as long as nothing changes, and every difference is named."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest

from unmask import recover_text
from unmask.protocols import observe_gradients


@pytest.fixture(scope="module")
def goldens():
    return importlib.import_module("goldens")


def test_a_stored_run_is_compared_and_a_changed_claim_is_named(goldens, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(goldens, "RECIPES", goldens.RECIPES[:1])
    file = tmp_path / "goldens.jsonl"
    runs = ["--runs", "gradients=1", "oracles=1"]
    assert goldens.main(["store", str(file), *runs]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["key"] for line in lines] == [f"contract {goldens.RECIPES[0]}", "gradients 0", "oracles 0"]
    assert all(line["claims"] for line in lines)
    assert goldens.main(["compare", str(file)]) == 0
    lines[1]["claims"][0]["status"] = "WRONG"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert goldens.main(["compare", str(file)]) == 1
    assert "gradients 0: status WRONG, now " in capsys.readouterr().out
    assert goldens.main(["store", str(file), *runs]) == 0  # goes on behind what is there
    assert len(file.read_text().splitlines()) == 3


def test_a_claim_is_what_users_rely_on(goldens, tiny_gpt2, one_thread):
    evidence = replace(observe_gradients(tiny_gpt2, [[5, 17, 99, 250]]), all_tokens_predicted=True)
    recovery = recover_text(evidence, tiny_gpt2)
    claim = goldens.claim_of(recovery)
    assert claim["texts"] == [[[5, 17, 99, 250], 1, True, []]]
    assert not list(goldens.differ([claim], [goldens.claim_of(replace(recovery, reason="another sentence"))]))
    unsure = replace(recovery.value.texts[0], certain=False)
    less = goldens.claim_of(replace(recovery, value=replace(recovery.value, texts=(unsure,))))
    assert [sentence.split()[0] for sentence in goldens.differ([claim], [less])] == ["texts"]


@pytest.mark.parametrize("words", [["compare", "missing.jsonl"], ["store", "x", "--runs", "gradients"]])
def test_wrong_calls_end_in_one_sentence(goldens, words, capsys):
    with pytest.raises(SystemExit) as ended:
        goldens.main(words)
    assert ended.value.code == 2
    assert "does not exist" in capsys.readouterr().err or "--runs" in words
