"""Vectors of the search are those of the recipe, whatever the lengths of the texts."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.models.pooling import EmbeddingRecipe, Pooling

TEXTS = [(5, 6, 7), (8,), (9, 10, 11, 12), (13,)]


@pytest.mark.parametrize("pooling", list(Pooling))
def test_vectors_are_those_of_the_recipe(tiny, pooling):
    if tiny.problem:
        pytest.skip(tiny.problem)
    recipe = EmbeddingRecipe(pooling, prefix=(3, 4))
    embedder = Embedder(tiny, recipe)
    found = embedder(TextBatch.of(TEXTS))
    one_by_one = [recipe.embed(tiny, torch.tensor([recipe.frame(tiny, list(text))])) for text in TEXTS]
    assert torch.allclose(found, torch.cat(one_by_one), atol=1e-5)
    assert torch.equal(found, embedder.exact(TextBatch.of(TEXTS)))
    assert embedder.num_texts == len(TEXTS)


def test_the_proof_is_in_the_models_own_precision(tiny_bert):
    precise = Embedder(tiny_bert.to(dtype=torch.float64), EmbeddingRecipe())
    texts = TextBatch.of(TEXTS)
    assert precise.exact(texts).dtype is torch.float64
    assert precise(texts).dtype is torch.float32
    assert 0 < float((precise.exact(texts) - Embedder(tiny_bert, EmbeddingRecipe()).exact(texts)).abs().max()) < 1e-5
