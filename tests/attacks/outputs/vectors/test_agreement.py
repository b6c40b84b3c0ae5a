"""A vector agrees with its text in every storage, with no other, and few digits are told as few bits."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors import agreement
from unmask.attacks.outputs.vectors.agreement import measure_computing_error, stored_vectors
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.defences.vector_table import parse_vector_defence
from unmask.evidence.vectors import VectorEvidence
from unmask.models.pooling import recipe_of
from unmask.protocols.vectors import observe_vectors

TEXTS = ["a man sold the cars.", "a man sold the car.", "the man sold a car."]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("told", [True, False])
def test_only_the_text_itself_agrees(minilm, dtype, told):
    fine = observe_vectors(minilm, TEXTS).vectors.double()
    evidence = observe_vectors(minilm, TEXTS, dtype=dtype)
    if not told:  # the values show how they were stored
        evidence = evidence.with_tensors(evidence.named_tensors())
    for number, stored in enumerate(stored_vectors(evidence, 0.0)):
        assert stored.agrees(fine).tolist() == [other == number for other in range(len(TEXTS))]
        assert stored.tells_apart(16, minilm.vocab_size)


def test_signs_agree_and_hold_few_bits(minilm):
    fine = observe_vectors(minilm, TEXTS)
    evidence = parse_vector_defence("signs")(fine, torch.Generator())
    stored = stored_vectors(evidence, 0.0)[0]
    assert bool(stored.agrees(fine.vectors[:1])[0])
    assert stored.tells_apart(8, minilm.vocab_size)
    assert not stored.tells_apart(16, minilm.vocab_size)


def test_noise_agrees_with_nothing(minilm):
    fine = observe_vectors(minilm, TEXTS)
    evidence = parse_vector_defence("noise:sigma=0.001")(fine, torch.Generator().manual_seed(0))
    assert not any(bool(stored.agrees(fine.vectors.double()).any()) for stored in stored_vectors(evidence, 0.0))


def test_a_step_as_large_as_the_numbers_proves_nothing(minilm):
    evidence = observe_vectors(minilm, TEXTS)
    coarse = type(evidence)(
        evidence.vectors, evidence.recipe, evidence.model_fingerprint, half_steps=torch.ones_like(evidence.vectors)
    )
    stored = stored_vectors(coarse, 0.0)[0]
    assert stored.agrees(evidence.vectors.double()).all()
    assert not stored.tells_apart(1, minilm.vocab_size)


def test_another_precision_is_measured(minilm, monkeypatch):
    # Few texts: without instructions for it, a processor multiplies in bfloat16 hundreds of times slower.
    monkeypatch.setattr(agreement, "_SAMPLE", (3, 6))
    embedder = Embedder(minilm, recipe_of(minilm))
    assert measure_computing_error(embedder, minilm, torch.float32) == 0
    assert 1e-4 < measure_computing_error(embedder, minilm, torch.bfloat16) < 0.1


@pytest.mark.parametrize("decimals", [3, 4, 5, 6])
def test_decimals_are_a_storage_too(minilm, decimals):
    seen = observe_vectors(minilm, ["the cat sat on the mat"]).vectors
    written = VectorEvidence.of(minilm, seen.numpy().round(decimals))
    (stored,) = stored_vectors(written, 0.0)
    assert float(stored.half_steps.max()) == pytest.approx(0.5 * 10.0**-decimals, rel=1e-3)
    assert bool(stored.agrees(seen)[0])
    (whole,) = stored_vectors(VectorEvidence.of(minilm, seen), 0.0)
    assert not whole.half_steps.any()
