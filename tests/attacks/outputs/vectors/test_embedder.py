"""Vectors of the search are those of the recipe, whatever the lengths of the texts."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.embedder import Embedder, _group
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
    assert torch.allclose(found, embedder.exact(TextBatch.of(TEXTS)), atol=1e-6)
    assert embedder.num_texts == len(TEXTS)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_texts_of_nearly_one_length_may_go_together(tiny, pooling):
    if tiny.problem:
        pytest.skip(tiny.problem)
    embedder, texts = Embedder(tiny, EmbeddingRecipe(pooling)), TextBatch.of([(5, 6, 7, 8, 9), (8, 9), (8, 9, 10, 11)])
    if embedder.may_pad():
        embedder.pads = True
        assert torch.allclose(embedder(texts), embedder.exact(texts), atol=1e-5)
        assert torch.allclose(embedder.precise(texts), embedder.exact(texts), atol=1e-5)


def test_groups_of_lengths():
    assert _group([0, 0, 3, 0, 1, 2, 1, 0, 0, 0, 4, 4, 2, 1], 1.2) == [(2, 3), (4, 1), (6, 3), (12, 10), (13, 1)]
    assert _group([1, 2, 0, 3], 1.0) == [(0, 1), (1, 2), (3, 3)]


def test_the_proof_is_in_the_models_own_precision(tiny_bert):
    precise = Embedder(tiny_bert.to(dtype=torch.float64), EmbeddingRecipe())
    texts = TextBatch.of(TEXTS)
    assert precise.exact(texts).dtype is torch.float64
    assert precise(texts).dtype is torch.float32
    assert 0 < float((precise.exact(texts) - Embedder(tiny_bert, EmbeddingRecipe()).exact(texts)).abs().max()) < 1e-5
