"""A text is proven by its vector, computed again, and by its neighbours' vectors."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors.agreement import stored_vectors
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.proof import Prover
from unmask.protocols import observe_vectors


@pytest.fixture
def prove(embedder, effects):
    return Prover(embedder, effects)


def test_the_text_agrees_and_its_neighbours_do_not(embedder, prove):
    text = tuple(embedder.model.encode("The door was open.")[1:-1])
    (stored,) = stored_vectors(observe_vectors(embedder.model, ["The door was open."]), 0.0)
    found = prove(stored, text)
    assert found.certain
    assert found.rejected > 100 * found.tolerance
    other = prove(stored, (*text[:-1], 1029))
    assert not other.agrees
    assert other.rejected is None


def test_a_text_that_is_as_close_is_listed(embedder, prove, monkeypatch):
    text = tuple(embedder.model.encode("The door was open.")[1:-1])
    (stored,) = stored_vectors(observe_vectors(embedder.model, ["The door was open."]), 0.0)
    monkeypatch.setattr("unmask.attacks.outputs.vectors.proof.CLEAR", 1e9)
    found = prove(stored, text, TextBatch.of([text, (5, 6)]))
    assert not found.certain
    assert (5, 6) in found.others
    assert text not in found.others


def test_the_empty_text_is_a_text(embedder, prove):
    stored = stored_vectors(observe_vectors(embedder.model, ["", "the"]), 0.0)
    assert [prove(each, ()).certain for each in stored] == [True, False]


def test_a_text_as_long_as_texts_get_may_go_on(embedder, prove, monkeypatch):
    monkeypatch.setattr("unmask.attacks.outputs.vectors.proof.max_length_of", lambda model: 3)
    (stored,) = stored_vectors(observe_vectors(embedder.model, ["the"]), 0.0)
    found = prove(stored, tuple(embedder.model.encode("the")[1:-1]))
    assert found.is_only
    assert not found.certain


def test_a_vector_of_zeros_has_a_distance(embedder, prove):
    evidence = observe_vectors(embedder.model, ["the"])
    (stored,) = stored_vectors(evidence.with_tensors({"000000": torch.zeros(384)}), 0.0)
    found = prove(stored, (1996,))
    assert not found.agrees
    assert found.distance == pytest.approx(1)
