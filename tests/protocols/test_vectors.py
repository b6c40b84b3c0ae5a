"""Embeddings as a service keeps them: sentence-transformers' own, stored in few digits."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from tests.audit.made import WORDS, save_bert, save_llama
from tests.sampling import in_turn, sample

from unmask.errors import InputError
from unmask.models import load_model
from unmask.models.catalog import CATALOG, find_package_folder
from unmask.models.pooling import Pooling
from unmask.protocols import observe_vectors
from unmask.protocols.vectors import STORAGES, store

SENTENCES = [
    "The patient was discharged on Friday.",
    "Transfer it today, please.",
    "A much longer sentence, so that the batch is padded and its mask matters to the mean of the others.",
]
# The same products in float32, summed in another order.
FLOAT32_PARITY = 2e-6


@pytest.fixture(scope="module")
def encoder():
    """MiniLM as sentence-transformers loads it."""
    library = pytest.importorskip("sentence_transformers", reason="comes with the dev extra")
    folder = find_package_folder(CATALOG["minilm-l6"])
    if folder is None:
        pytest.skip("real weights are missing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.SentenceTransformer(str(folder), device="cpu")


def test_vectors_are_those_of_sentence_transformers(minilm, encoder):
    theirs = encoder.encode(SENTENCES, convert_to_tensor=True)
    ours = observe_vectors(minilm, SENTENCES)
    assert float((ours.vectors - theirs).norm(dim=1).max()) < FLOAT32_PARITY
    ours.check(minilm)


def test_prefixes_and_cuts_are_those_of_sentence_transformers(minilm, encoder):
    theirs = encoder.encode(SENTENCES, prompt="query: ", truncate_dim=100, convert_to_tensor=True)
    ours = observe_vectors(minilm, SENTENCES, prefix="query: ", dimensions=100)
    assert float((ours.vectors - theirs).norm(dim=1).max()) < FLOAT32_PARITY
    framed = [torch.tensor([ours.recipe.frame(minilm, minilm.encode(text)[1:-1])]) for text in SENTENCES]
    with torch.no_grad():
        again = torch.cat([ours.recipe.embed(minilm, tokens) for tokens in framed])
    assert float((ours.vectors - again).norm(dim=1).max()) < FLOAT32_PARITY


def test_long_texts_are_cut_as_sentence_transformers_cut_them(minilm, encoder):
    long = "word " * 400
    with pytest.warns(UserWarning, match="cut 1 of 1 text to 256 tokens"):
        ours = observe_vectors(minilm, [long])
    assert float((ours.vectors[0] - encoder.encode(long, convert_to_tensor=True)).norm()) < FLOAT32_PARITY


@pytest.mark.parametrize("pooling", list(Pooling))
def test_every_pooling_of_every_direction(tiny_bert, tiny_llama, pooling):
    for model in (tiny_bert, tiny_llama):
        together = observe_vectors(model, [[5, 17, 99], [400, 3, 8, 44, 45]], pooling=pooling)
        alone = observe_vectors(model, [[5, 17, 99]], pooling=pooling)
        assert together.recipe.pooling is pooling
        assert torch.allclose(together.vectors[:1], alone.vectors, atol=1e-5)


@pytest.mark.parametrize("dtype", STORAGES)
def test_storage_is_at_most_half_a_step_off(tiny_bert, dtype):
    texts = [[5, 17, 99], [400, 3, 8]]
    exact, stored = (observe_vectors(tiny_bert, texts, dtype=kind) for kind in (None, dtype))
    off = (stored.vectors - exact.vectors).abs()
    if dtype == "float32":
        assert stored.half_steps is None
        assert not off.any()
    else:
        assert stored.half_steps is not None
        assert (off <= stored.half_steps * (1 + 1e-3)).all()  # the division by the scale rounds too
        assert off.any()


def test_int8_has_255_levels():
    vectors, steps = store(torch.tensor([[1.0, -0.5, 0.003], [0.0, 0.0, 0.0]]), "int8")
    assert steps is not None
    assert torch.allclose(vectors[0] * 127, torch.tensor([127.0, -64.0, 0.0]))
    assert not vectors[1].any()


def test_what_cannot_be_is_refused(tiny_bert):
    with pytest.raises(InputError, match="dtype must be one of"):
        observe_vectors(tiny_bert, [[1, 2]], dtype="int4")
    with pytest.raises(InputError, match="dimensions must be at most 64"):
        observe_vectors(tiny_bert, [[1, 2]], dimensions=65)
    with pytest.raises(InputError, match="the batch is empty"):
        observe_vectors(tiny_bert, [])


MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last", "weightedmean": "weighted_mean"}


@sample("mode, normalised", product(MODES, [True, False]), in_turn(MODES, [True, False]))
def test_folders_that_sentence_transformers_writes_are_read(tmp_path, mode, normalised):
    """Every pooling, with and without Normalize and a default prompt, of an encoder and of a decoder."""
    library = pytest.importorskip("sentence_transformers", reason="comes with the dev extra")
    from sentence_transformers import models

    for save in (save_bert, save_llama):
        plain, whole = tmp_path / f"{save.__name__}-plain", tmp_path / f"{save.__name__}-whole"
        plain.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformer = models.Transformer(str(save(plain)))
            pooling = models.Pooling(transformer.get_word_embedding_dimension(), pooling_mode=mode)
            modules = [transformer, pooling, *([models.Normalize()] if normalised else [])]
            prompts = {"prompts": {"query": "w7 w8 "}, "default_prompt_name": "query"} if normalised else {}
            encoder = library.SentenceTransformer(modules=modules, device="cpu", **prompts)
            encoder.save(str(whole))
        model = load_model(str(whole))
        ours = observe_vectors(model, list(WORDS[:3]))
        theirs = encoder.encode(list(WORDS[:3]), convert_to_tensor=True)
        assert (ours.recipe.pooling.value, ours.recipe.normalise) == (MODES[mode], normalised)
        assert len(ours.recipe.prefix) == (2 if normalised else 0)
        assert torch.allclose(ours.vectors, theirs, atol=1e-5)
