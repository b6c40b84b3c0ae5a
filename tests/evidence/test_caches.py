"""Evidence of caches: on disk and back, from transformers' own objects, and refused where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from unmask.errors import EvidenceError
from unmask.evidence import CacheEvidence, load_evidence
from unmask.models.caches import fill_cache, read_cache
from unmask.protocols import observe_cache

TOKENS = torch.tensor([[5, 17, 99, 17], [3, 8, 21, 9]])


@pytest.fixture
def evidence(tiny_llama) -> CacheEvidence:
    return observe_cache(tiny_llama, [[5, 17, 99], [3, 8]], layer=1)


@pytest.mark.parametrize("parts", ["both", "keys", "values"])
def test_a_cache_comes_back(tiny_llama, tmp_path, parts):
    evidence = observe_cache(tiny_llama, [[5, 17, 99], [3, 8]], layer=1, parts=parts, heads=[1], first_position=1)
    again = load_evidence(evidence.save(tmp_path / "cache.safetensors"))
    assert again.parts.keys() == evidence.parts.keys()
    assert all(torch.equal(again.parts[name], part) for name, part in evidence.parts.items())
    for name in ("layer", "heads", "first_position", "model_fingerprint", "compute_dtype", "known_beginning"):
        assert getattr(again, name) == getattr(evidence, name)
    again.check(tiny_llama)


def test_it_is_made_of_what_transformers_keeps(tiny_llama):
    cache = fill_cache(tiny_llama, TOKENS)
    keys, values = read_cache(cache, 1)
    for given in (cache, {"keys": keys.transpose(1, 2), "values": values.transpose(1, 2)}):
        evidence = CacheEvidence.of(tiny_llama, given, layer=1)
        assert torch.equal(evidence.keys, keys)
        assert torch.equal(evidence.values, values)
        assert evidence.heads == (0, 1)
    pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
    assert torch.equal(CacheEvidence.of(tiny_llama, pairs, layer=1, heads=[1]).keys, keys[:, :, [1]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    for argument in ("mask", "attention_mask"):  # the tokenizer's name for it
        assert torch.equal(CacheEvidence.of(tiny_llama, cache, layer=1, **{argument: mask}).mask, mask.bool())
    part = CacheEvidence.of(tiny_llama, {"values": values.transpose(1, 2)[:, [0]]}, layer=1, heads=[0])
    assert part.keys is None
    empty = transformers.DynamicCache()
    with pytest.raises(EvidenceError, match="layer 1"):
        CacheEvidence.of(tiny_llama, empty, layer=1)
    with pytest.raises(EvidenceError, match="rename"):
        CacheEvidence.of(tiny_llama, {"k": keys}, layer=1)


def test_defences_change_rows_of_heads_and_leave_padding(evidence):
    names = evidence.named_tensors()
    assert len(names) == 5 * 2 * 2  # tokens, heads, parts
    again = evidence.with_tensors({name: 2 * row for name, row in names.items()})
    assert torch.equal(again.keys, 2 * evidence.keys)
    assert not again.values[~evidence.mask].any()
    assert again.to("cpu").heads == evidence.heads


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keys": None, "values": None}, "got neither"),
        ({"keys": torch.zeros(2, 3, 5)}, "use CacheEvidence.of"),
        ({"heads": (0,)}, "1 heads"),
        ({"heads": (0, 0)}, "different"),
        ({"layer": -1}, "layer"),
        ({"first_position": -1}, "first_position"),
        ({"values": torch.full((2, 3, 2, 16), float("nan"))}, "NaN"),
        ({"known_beginning": ("a",)}, "token ids"),
    ],
)
def test_what_makes_no_sense_is_refused(evidence, changes, said):
    with pytest.raises(EvidenceError, match=said):
        replace(evidence, **changes)


def test_a_cache_must_be_this_model_s(evidence, tiny_llama, tiny_gpt2):
    with pytest.raises(EvidenceError, match="fingerprint"):
        evidence.check(tiny_gpt2)
    with pytest.raises(EvidenceError, match="lacks"):
        replace(evidence, layer=3).check(tiny_llama)
    with pytest.raises(EvidenceError, match="do not fit"):
        replace(evidence, heads=(0, 2)).check(tiny_llama)
    with pytest.raises(EvidenceError, match="vocabulary"):
        replace(evidence, known_beginning=(10**6,)).check(tiny_llama)
