"""Vectors to texts: proven on real weights, in few digits too; what is no vector of a text is not claimed."""

from __future__ import annotations

import pytest
import torch
from tests.sampling import sample

from unmask import VectorEvidence, observe_vectors, recover_text
from unmask.attacks.outputs.vectors import attack as attack_module
from unmask.attacks.outputs.vectors.attack import EmbeddingAttack
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.models.pooling import EmbeddingRecipe
from unmask.recovery import Status

TEXTS = ["The door was open.", "She left early."]


@pytest.fixture(autouse=True)
def small_fit(monkeypatch, effects, minilm):
    original = attack_module.load_effects
    monkeypatch.setattr(
        attack_module,
        "load_effects",
        lambda embedder, progress: effects if embedder.model is minilm else original(embedder, progress),
    )


@sample("dtype", ["float32", "int8"], ["int8"])
def test_short_sentences_are_proven(minilm, dtype):
    stages = []
    evidence = observe_vectors(minilm, TEXTS, dtype=dtype)
    recovery = recover_text(evidence, minilm, progress=lambda stage, done, total: stages.append((done, total)))
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert [(text.row, text.text) for text in recovery.value.texts] == [
        (0, "the door was open."),
        (1, "she left early."),
    ]
    assert recovery.certificate.holds
    assert recovery.certificate.rejected > 0.01
    assert stages[-1][0] == stages[-1][1]


def test_what_is_no_vector_of_a_text_is_not_claimed(minilm):
    vectors = torch.nn.functional.normalize(torch.randn(1, 384, generator=torch.Generator().manual_seed(0)), dim=1)
    attack = EmbeddingAttack(max_texts=400, max_attempts=1, language="none")
    recovery = recover_text(VectorEvidence.of(minilm, vectors), minilm, attack=attack)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.value.certain
    assert not recovery.value.token_set
    assert not recovery.certificate.holds


def test_a_text_that_agrees_with_coarse_numbers_is_not_certain(minilm):
    """Half steps as long as the vector: every text agrees, and the reason says that digits are few."""
    evidence = observe_vectors(minilm, TEXTS[:1])
    coarse = VectorEvidence(
        evidence.vectors, evidence.recipe, evidence.model_fingerprint, half_steps=torch.ones_like(evidence.vectors)
    )
    recovery = recover_text(coarse, minilm, attack=EmbeddingAttack(max_texts=300, max_attempts=1, language="none"))
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert not recovery.value.certain
    assert recovery.value.texts[0].ambiguities


def test_seconds_end_the_search(minilm):
    evidence = observe_vectors(minilm, ["Nobody told the children about the letter from the old man."])
    recovery = recover_text(evidence, minilm, attack=EmbeddingAttack(seconds=0.01, language="none"))
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert "raise the effort" in recovery.reason
    assert recovery.value.texts
    assert not recovery.value.certain


@pytest.mark.slow
def test_a_prefix_is_known_and_not_part_of_the_text(minilm):
    evidence = observe_vectors(minilm, TEXTS[:1], prefix="query: ")
    assert evidence.recipe.prefix
    recovery = recover_text(evidence, minilm, attack=EmbeddingAttack(max_attempts=1, language="none"))
    assert recovery.value.texts[0].text == "the door was open."
    assert recovery.status is Status.RECOVERED


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["cls", "weighted_mean"])
def test_other_poolings(minilm, pooling, monkeypatch):
    monkeypatch.undo()
    evidence = observe_vectors(minilm, TEXTS, pooling=pooling)
    assert recover_text(evidence, minilm).status is Status.RECOVERED


@pytest.mark.slow
def test_a_cut_vector(minilm, monkeypatch):
    monkeypatch.undo()
    evidence = observe_vectors(minilm, TEXTS, dimensions=128)
    assert recover_text(evidence, minilm).status is Status.RECOVERED


def test_models_without_a_tokenizer_are_read_too(tiny_bert):
    texts = [[17, 4, 250]]
    evidence = observe_vectors(tiny_bert, texts)
    assert evidence.recipe == EmbeddingRecipe()
    recovery = recover_text(evidence, tiny_bert)
    assert [text.tokens for text in recovery.value.texts] == [tuple(texts[0])], recovery.reason
    assert TextBatch.of([tuple(texts[0])]).as_tuples() == [tuple(texts[0])]


def test_the_empty_text_is_found_at_once(minilm):
    recovery = recover_text(observe_vectors(minilm, [""]), minilm)
    assert recovery.status is Status.RECOVERED
    assert [text.text for text in recovery.value.texts] == ["[CLS] [SEP]"]
