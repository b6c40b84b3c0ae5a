"""Stored vectors of small models, read by a stand-in that tries the words of the data one text after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.audit.channels.stories import NO_LEAK, group, tell
from tests.audit.made import WORDS, make_plan

from unmask.attacks.run import Run
from unmask.audit.channels import seen_texts, vectors
from unmask.audit.findings.finding import Outcome
from unmask.evidence import VectorEvidence
from unmask.models import Model
from unmask.protocols.vectors import embed_texts
from unmask.recovery import Aim, Certificate, RecoveredText, RecoveredTexts, Recovery, Status, searches_of


@pytest.fixture(scope="module", autouse=True)
def small_layers(one_thread: None) -> None:
    """Threads on busy cores wait for each other, and sums in another order have other last digits."""


@torch.no_grad()
def try_words(evidence: VectorEvidence, model: Model, progress: Any) -> Recovery[RecoveredTexts]:
    """Of the texts that the data holds those whose vector is the one seen, up to half a step."""
    found = []
    for word in WORDS:
        tokens = model.encode(word)
        vector = evidence.recipe.embed(model, torch.tensor([tokens]))
        for number, seen in enumerate(evidence.vectors):
            allowed = 1e-5 if evidence.half_steps is None else float(evidence.half_steps[number].max()) + 1e-5
            if seen.shape == vector[0].shape and float((seen - vector[0]).abs().max()) <= allowed:
                found.append(RecoveredText(tuple(tokens), model.decode(tokens), True, 0.0))
    tokens_seen = frozenset(token for text in found for token in text.tokens)
    whole = len(found) == len(evidence.vectors)
    status = Status.RECOVERED if whole else Status.NOTHING_FOUND
    claim = Certificate("the vector agrees", 0.0, 1e-5, 1.0) if found else Certificate.none("nothing agrees")
    value = RecoveredTexts(tuple(found), tokens_seen)
    return Recovery(
        value, status, "words were tried", claim, Run().cost(), ("vectors",), searches_of(Aim.TOKENS, Aim.TEXTS)
    )


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The channel's own call of `recover_text`, with the stand-in in place of the default attack."""
    recover, calls = seen_texts.recover_text, []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, dict(options)))
        return recover(*arguments, **{**options, "attack": try_words})

    monkeypatch.setattr(seen_texts, "recover_text", call)
    return calls


@pytest.fixture(params=["bert_folder", "llama_folder"])
def folder(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("rest", ["", 'poolings = ["weighted_mean"]', 'storages = ["int8"]', 'storages = ["float16"]'])
def test_open_vectors_leak_their_texts(tmp_path, folder, rest):
    (found,) = tell(make_plan(tmp_path, group("vectors", folder, rest)))
    assert found.outcome is Outcome.LEAK
    assert found.metrics["exact_texts"] == 2
    assert found.metrics["false_texts"] == 0


@pytest.mark.parametrize("defence", ["rotate", "private:epsilon=1", "noise:sigma=1"])
def test_vectors_that_were_changed_do_not_leak_to_the_stand_in(tmp_path, folder, defence):
    (found,) = tell(make_plan(tmp_path, group("vectors", folder, f'defences = ["{defence}"]')))
    assert found.outcome in NO_LEAK
    assert found.metrics["exact_texts"] == 0


def test_a_cut_is_no_defence(tmp_path, folder):
    (found,) = tell(make_plan(tmp_path, group("vectors", folder, 'defences = ["cut:dimensions=32"]')))
    assert found.outcome is Outcome.LEAK


def test_the_attack_gets_evidence_and_model_and_nothing_else(tmp_path, bert_folder, stand_in):
    tell(make_plan(tmp_path, group("vectors", bert_folder)))
    ((arguments, options),) = stand_in
    evidence, model = arguments
    assert isinstance(evidence, VectorEvidence)
    assert isinstance(model, Model)
    assert (options.keys(), options["attack"]) == ({"attack", "effort"}, "default")
    assert not any(word in repr(evidence) for word in " ".join(WORDS).split())


def test_a_pooling_that_says_nothing_is_refused(tiny_gpt2, tiny_bert):
    spec = {"model": "m", "pooling": "cls"}
    assert "sees no other" in vectors.find_model_fault(spec, tiny_gpt2)
    assert vectors.find_model_fault(spec, tiny_bert) is None
    assert vectors.find_fault(spec) is None


def test_texts_are_cut_before_they_are_embedded(tmp_path, llama_folder, stand_in):
    tell(make_plan(tmp_path, group("vectors", llama_folder, 'max_lengths = ["model", 3]')))
    (whole, model), (cut, _) = (arguments for arguments, _ in stand_in)
    assert not torch.allclose(whole.vectors, cut.vectors)
    tokens = [model.encode(word, 3) for word in WORDS]
    made = {tuple(part.round(decimals=4).tolist()) for part in embed_texts(model, tokens, cut.recipe)}
    assert {tuple(part.round(decimals=4).tolist()) for part in cut.vectors} <= made
