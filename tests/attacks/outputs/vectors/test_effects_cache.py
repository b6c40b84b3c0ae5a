"""A model is fitted once, or never; a damaged file is fitted again, and a folder that cannot be written is no error."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors import effects_cache, insertion_effects
from unmask.attacks.outputs.vectors.effects_cache import (
    load_effects,
    packaged_regression,
    read_sentences,
    save_regression,
)
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.run import silent
from unmask.models.pooling import EmbeddingRecipe, Pooling, recipe_of


@pytest.fixture
def fits(monkeypatch, tmp_path):
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path))
    monkeypatch.setattr(effects_cache, "_CONTEXTS", {"cpu": 50})
    made = []
    original = insertion_effects.fit_regression

    def fit(*arguments, **options):
        made.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(insertion_effects, "fit_regression", fit)
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


def test_a_regression_of_the_package_is_taken_for_its_weights_and_recipe_alone(fits, tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(effects_cache, "_REGRESSIONS", tmp_path)
    embedder = Embedder(tiny_bert, EmbeddingRecipe())
    fitted = load_effects(embedder, silent)
    path = save_regression(embedder, tmp_path)
    (tmp_path / "effects").rename(tmp_path / "before")
    fits.clear()
    rows = load_effects(embedder, silent).rows
    assert not fits
    assert float((rows - fitted.rows).norm()) < 1e-2 * float(fitted.rows.norm())  # 8 bits
    assert packaged_regression(Embedder(tiny_bert, EmbeddingRecipe(Pooling.CLS))) is None
    other = tiny_bert.to()
    with torch.no_grad():
        other.parameter(other.token_embedding)[7] += 0.1
    assert packaged_regression(Embedder(other, EmbeddingRecipe())) is None
    path.unlink()
    assert packaged_regression(embedder) is None


def test_minilm_needs_no_fit(minilm):
    assert packaged_regression(Embedder(minilm, recipe_of(minilm))) is not None
