"""Evidence of embeddings: files, what is inferred of vectors that were found, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from unmask.errors import EvidenceError
from unmask.evidence import VectorEvidence, load_evidence
from unmask.evidence.vectors import half_steps_of
from unmask.linalg.product_codes import decode_codes, product_codes
from unmask.models.pooling import EmbeddingRecipe, Pooling

ROWS = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
UNITS = ROWS / ROWS.norm(dim=1, keepdim=True)


def evidence(**changes: object) -> VectorEvidence:
    parts = {"vectors": UNITS, "recipe": EmbeddingRecipe(), "model_fingerprint": "0123456789abcdef"}
    return VectorEvidence(**(parts | changes))


def test_vectors_come_back(tmp_path):
    recipe = EmbeddingRecipe(Pooling.WEIGHTED_MEAN, False, 64, True, (5, 6))
    before = evidence(
        recipe=recipe,
        compute_dtype=torch.bfloat16,
        half_steps=torch.full((3, 64), 0.01),
        quantiser=torch.randn(8, 256, 8),
        offsets=ROWS,
        error=0.25,
    )
    after = load_evidence(before.save(tmp_path / "vectors.safetensors"))
    assert type(after) is VectorEvidence
    for name in ("vectors", "half_steps", "quantiser", "offsets"):
        assert torch.equal(getattr(after, name), getattr(before, name))
    assert (after.recipe, after.compute_dtype, after.error) == (recipe, torch.bfloat16, 0.25)


def test_what_is_not_told_comes_back_as_none(tmp_path):
    after = load_evidence(evidence().save(tmp_path / "vectors.safetensors"))
    assert (after.half_steps, after.quantiser, after.error) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vectors": torch.ones(64)}, "vectors must be"),
        ({"vectors": torch.ones(0, 64)}, "vectors must be"),
        ({"vectors": torch.full((2, 4), float("nan"))}, "'vectors' holds 8 of 8 values"),
        ({"half_steps": torch.ones(3, 63)}, "half_steps must have the shape"),
        ({"offsets": torch.ones(2, 64)}, "offsets must have the shape"),
        ({"half_steps": -torch.ones(3, 64)}, "half_steps must be 0 or more"),
        ({"quantiser": torch.ones(8, 256, 9)}, "a quantiser must be"),
        ({"error": -1.0}, "error must be"),
    ],
)
def test_what_cannot_be_is_refused(changes, said):
    with pytest.raises(EvidenceError, match=said):
        evidence(**changes)


def test_defences_change_a_text_at_a_time():
    before = evidence(half_steps=torch.ones(3, 64))
    after = before.with_tensors({name: 2 * vector for name, vector in before.named_tensors().items()})
    assert torch.equal(after.vectors, 2 * before.vectors)
    assert after.half_steps is None
    assert after.to("cpu").recipe == before.recipe


def test_some_texts_alone():
    before = evidence(half_steps=torch.rand(3, 64), offsets=ROWS, quantiser=torch.randn(8, 16, 8))
    after = before.select([2, 0])
    assert torch.equal(after.vectors, before.vectors[[2, 0]])
    assert torch.equal(after.half_steps, before.half_steps[[2, 0]])
    assert after.quantiser.shape == (8, 16, 8)


def test_a_candidate_is_coded_again():
    centroids = torch.randn(8, 16, 8, generator=torch.Generator().manual_seed(1))
    offsets = ROWS / 9
    stored = decode_codes(product_codes(UNITS - offsets, centroids), centroids) + offsets
    found = evidence(vectors=stored, quantiser=centroids, offsets=offsets)
    assert found.same_code(1, UNITS).tolist() == [False, True, False]
    with pytest.raises(EvidenceError, match="without a product quantiser"):
        evidence().same_code(0, UNITS)


def test_vectors_fit_their_model(tiny_bert, tiny_gpt2):
    found = VectorEvidence.of(tiny_bert, UNITS)
    found.check(tiny_bert)
    with pytest.raises(EvidenceError, match="made with a model of fingerprint"):
        found.check(tiny_gpt2)
    with pytest.raises(EvidenceError, match="do not fit this model"):
        evidence(model_fingerprint=tiny_bert.fingerprint(), recipe=EmbeddingRecipe(dimensions=9)).check(tiny_bert)
    with pytest.raises(EvidenceError, match="tokens that the model lacks"):
        evidence(model_fingerprint=tiny_bert.fingerprint(), recipe=EmbeddingRecipe(prefix=(10**6,))).check(tiny_bert)


# What is inferred


@pytest.mark.parametrize("array", [UNITS, UNITS.numpy(), UNITS[0], UNITS[0].numpy(), UNITS.numpy().tolist()])
def test_numpy_torch_and_single_vectors_are_taken(tiny_bert, array):
    found = VectorEvidence.of(tiny_bert, array)
    assert found.vectors.shape[1] == 64
    assert found.recipe == EmbeddingRecipe(Pooling.MEAN, normalise=True)


def test_lengths_show_whether_vectors_are_normalised(tiny_bert):
    with pytest.warns(UserWarning, match=r"lengths from 7 to 7 .*recipe makes length 1, .*if they were scaled, divide"):
        assert not VectorEvidence.of(tiny_bert, 7 * UNITS).recipe.normalise
    assert VectorEvidence.of(tiny_bert, UNITS.half()).recipe.normalise
    assert not VectorEvidence.of(tiny_bert, UNITS, normalise=False).recipe.normalise


def test_nothing_is_said_where_lengths_are_as_they_should_be(tiny_bert):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VectorEvidence.of(tiny_bert, UNITS)
        VectorEvidence.of(tiny_bert, 7 * UNITS, normalise=False)
        VectorEvidence.of(tiny_bert, 7 * UNITS, normalise=True)


def test_zeros_are_no_embedding_of_length_1(tiny_bert):
    rows = torch.cat([UNITS, torch.zeros(8, 64)])
    with pytest.raises(EvidenceError, match=r"all zero in rows 3, 4, 5, 6, 7, 8 and 2 more, and no embedding.*leave"):
        VectorEvidence.of(tiny_bert, rows)
    with pytest.raises(EvidenceError, match="all zero in row 0,"):
        VectorEvidence.of(tiny_bert, rows[3])
    assert len(VectorEvidence.of(tiny_bert, rows[rows.any(1)]).vectors) == 3
    assert len(VectorEvidence.of(tiny_bert, rows, normalise=False).vectors) == 11


def test_cut_vectors_are_told_by_their_width_and_length(tiny_bert):
    cut = UNITS[:, :16]
    with pytest.warns(UserWarning, match="the vectors have 16 numbers and this bert model makes 64"):
        shorter = VectorEvidence.of(tiny_bert, cut).recipe
    assert (shorter.dimensions, shorter.normalise, shorter.renormalise) == (16, True, False)
    scaled = VectorEvidence.of(tiny_bert, cut / cut.norm(dim=1, keepdim=True), dimensions=16).recipe
    assert (scaled.dimensions, scaled.normalise, scaled.renormalise) == (16, True, True)
    with pytest.warns(UserWarning, match="if they were scaled"):
        plain = VectorEvidence.of(tiny_bert, 40 * cut, dimensions=16).recipe
    assert (plain.dimensions, plain.normalise, plain.renormalise) == (16, False, False)


def test_the_recipe_can_be_given(minilm):
    found = VectorEvidence.of(
        minilm, np.full((2, 384), 384**-0.5), pooling="cls", prefix="query: ", half_steps=[[0.1] * 384]
    )
    assert found.recipe.pooling is Pooling.CLS
    assert len(found.recipe.prefix) == 2
    assert found.half_steps is not None
    assert found.half_steps.shape == (2, 384)


@pytest.mark.parametrize("options", [{"array": np.ones((2, 65))}, {"array": UNITS, "dimensions": 32}])
def test_widths_that_cannot_be_are_refused(tiny_bert, options):
    with pytest.raises(EvidenceError, match="load the model that made them"):
        VectorEvidence.of(tiny_bert, **options)


@pytest.mark.parametrize("dtype", [">f4", np.longdouble])
def test_floats_of_other_machines_and_longer_ones_are_taken(tiny_bert, dtype):
    found = VectorEvidence.of(tiny_bert, UNITS.numpy().astype(dtype), half_steps=0.1)
    assert torch.equal(found.vectors.float(), UNITS)
    assert found.half_steps.shape == UNITS.shape


@pytest.mark.parametrize(
    ("array", "options", "said"),
    [
        (np.float32(3), {}, r"the vectors have the shape \(\), expected \(texts, numbers\)"),
        (np.ones((0, 64)), {}, r"the vectors have the shape \(0, 64\)"),
        (np.ones((1, 2, 64)), {}, r"the vectors have the shape \(1, 2, 64\)"),
        (np.array([["a"]]), {}, "'vectors' must be a tensor or an array of numbers, got an array of <U1"),
        ([[1.0], [1.0, 2.0]], {}, "'vectors' is no array of numbers .*rows of one width"),
        (np.full((2, 64), np.nan), {}, r"NaN or Inf.*leave such rows out, array\[numpy\.isfinite\(array\)\.all\(1\)\]"),
        (UNITS, {"half_steps": [0.1, 0.2]}, r"half_steps must have the shape of the vectors, \(3, 64\).*got \(2,\)"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(tiny_bert, array, options, said):
    with pytest.raises(EvidenceError, match=said):
        VectorEvidence.of(tiny_bert, array, **options)


def test_codes_alone_are_refused(tiny_bert):
    with pytest.raises(EvidenceError, match="codes alone are no vectors"):
        VectorEvidence.of(tiny_bert, np.ones((2, 64), dtype=np.int8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_at_most_half_a_step_off(dtype):
    values = torch.cat([UNITS.flatten(), 1e-5 * UNITS.flatten(), 1e-7 * UNITS.flatten()])[None]
    stored = values.to(dtype)
    steps = half_steps_of(stored)
    off = (stored.float() - values).abs()
    assert steps is not None
    assert (off <= steps).all()
    assert float((off / steps).max()) > 0.9
    assert half_steps_of(values) is None
