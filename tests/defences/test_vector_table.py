"""The table of defences of vectors: every one runs, is written one way, and leaves the evidence as it was."""

from __future__ import annotations

import pytest
import torch

from unmask.defences.vector_table import VECTOR_DEFENCES, VectorDefence, parse_vector_defence
from unmask.errors import InputError
from unmask.evidence import VectorEvidence
from unmask.models.pooling import EmbeddingRecipe

UNITS = torch.nn.functional.normalize(torch.randn(5, 256, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", VECTOR_DEFENCES)
def test_every_defence_changes_vectors_by_its_seed(name):
    evidence = VectorEvidence(UNITS.clone(), EmbeddingRecipe(), "model")
    defence = parse_vector_defence(VECTOR_DEFENCES[name].example)
    once, again = (defence(evidence, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(once.vectors, again.vectors)
    assert once.vectors.shape[0] == 5
    assert once.vectors.shape != UNITS.shape or not torch.equal(once.vectors, UNITS)
    assert torch.equal(evidence.vectors, UNITS)
    assert parse_vector_defence(str(defence)) == defence


def test_defences_without_a_meaning_for_vectors_are_refused():
    with pytest.raises(InputError, match="there is no defence of vectors 'withhold'"):
        parse_vector_defence("withhold:pattern=wte")
    with pytest.raises(InputError, match="'epsilon' must be a finite number above 0"):
        VectorDefence("private", {"epsilon": 0})
