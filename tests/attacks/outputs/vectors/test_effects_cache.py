"""A model is fitted once; a damaged file is fitted again, and a folder that cannot be written is no error."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors import effects_cache
from unmask.attacks.outputs.vectors.effects_cache import load_effects, read_sentences
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.run import silent
from unmask.models.pooling import EmbeddingRecipe, Pooling


@pytest.fixture
def fits(monkeypatch, tmp_path):
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path))
    monkeypatch.setattr(effects_cache, "_CONTEXTS", {"cpu": 50})
    made = []
    original = effects_cache.fit_insertion_effects

    def fit(*arguments, **options):
        made.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(effects_cache, "fit_insertion_effects", fit)
    return made


def test_the_second_time_it_is_read(fits, tiny_bert, tmp_path):
    embedder = Embedder(tiny_bert, EmbeddingRecipe())
    first, second = (load_effects(embedder, silent) for _ in range(2))
    assert len(fits) == 1
    assert torch.equal(first.rows, second.rows)
    load_effects(Embedder(tiny_bert, EmbeddingRecipe(Pooling.CLS)), silent)
    assert len(fits) == 2


def test_a_damaged_file_is_fitted_again(fits, tiny_bert, tmp_path):
    embedder = Embedder(tiny_bert, EmbeddingRecipe())
    load_effects(embedder, silent)
    (path,) = (tmp_path / "effects").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    load_effects(embedder, silent)
    assert len(fits) == 2


def test_a_folder_that_cannot_be_made_is_no_error(fits, tiny_bert, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "file" / "below"))
    assert load_effects(Embedder(tiny_bert, EmbeddingRecipe()), silent).rows.shape[0] == tiny_bert.vocab_size


def test_sentences_have_no_special_tokens(minilm):
    sentences = read_sentences(minilm)
    assert len(sentences) > 2000
    assert not minilm.special_tokens & {token for sentence in sentences for token in sentence}
