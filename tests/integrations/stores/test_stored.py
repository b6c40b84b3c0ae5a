"""From what a store gives to evidence."""

from __future__ import annotations

import pytest
import torch

from unmask.errors import EvidenceError
from unmask.integrations.stores.stored import StoredVectors, choose_one, need


def test_evidence_keeps_what_the_store_tells(tiny_bert):
    vectors = torch.nn.functional.normalize(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    quantiser = torch.randn(8, 16, 8)
    stored = StoredVectors(vectors, ("a", "b", "c"), "about", 0.01 * torch.ones(3, 64), quantiser, vectors / 2, 0.5)
    found = stored.evidence(tiny_bert, pooling="cls")
    found.check(tiny_bert)
    assert torch.equal(found.quantiser, quantiser)
    assert torch.equal(found.offsets, vectors / 2)
    assert torch.equal(found.half_steps, 0.01 * torch.ones(3, 64))
    assert (found.error, found.recipe.pooling.value, found.recipe.normalise) == (0.5, "cls", True)


def test_codes_change_lengths_and_so_tell_nothing_of_them(tiny_bert):
    short = 0.7 * torch.nn.functional.normalize(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    assert StoredVectors(short, ("a", "b", "c"), "codes", error=0.7).evidence(tiny_bert).recipe.normalise
    assert (
        not StoredVectors(short, ("a", "b", "c"), "codes", error=0.7)
        .evidence(tiny_bert, normalise=False)
        .recipe.normalise
    )
    with pytest.warns(UserWarning, match=r"lengths from 0\.7 to 0\.7"):
        assert not StoredVectors(short, ("a", "b", "c"), "numbers").evidence(tiny_bert).recipe.normalise


def test_a_missing_library_says_how_to_get_it():
    with pytest.raises(EvidenceError, match=r"reading a store needs the package 'no_such_package'.*unmask\[stores\]"):
        need("no_such_package", "a store")


def test_one_of_several_must_be_named():
    assert choose_one(["a"], None, "table", "x") == "a"
    assert choose_one(["a", "b"], "b", "table", "x") == "b"
    with pytest.raises(EvidenceError, match="x has 2 of the kind 'table': a, b; choose one"):
        choose_one(["b", "a"], None, "table", "x")


def test_where_there_is_none_nothing_is_to_be_chosen():
    with pytest.raises(EvidenceError, match="x has no table with vectors: it holds nothing, expected a table; give"):
        choose_one([], "a", "table", "x")
