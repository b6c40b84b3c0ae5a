"""The cache that a model fills, in the types that servers store, whole or a page of it."""

from __future__ import annotations

import pytest
import torch

from unmask.errors import InputError
from unmask.models.caches import fill_cache, read_cache
from unmask.protocols.caches import STORAGES, observe_cache, store

TEXTS = [[5, 17, 99, 8], [3, 21]]


def test_it_is_the_model_s_own_cache(tiny_llama):
    evidence = observe_cache(tiny_llama, TEXTS, layer=2)
    for row, text in enumerate(TEXTS):
        keys, values = read_cache(fill_cache(tiny_llama, torch.tensor([text])), 2)
        torch.testing.assert_close(evidence.keys[row, : len(text)], keys[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(evidence.values[row, : len(text)], values[0], rtol=1e-4, atol=1e-5)
    assert evidence.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert not evidence.keys[~evidence.mask].any()


def test_a_page_of_some_heads(tiny_llama):
    whole = observe_cache(tiny_llama, TEXTS, layer=1)
    page = observe_cache(tiny_llama, TEXTS, layer=1, parts="keys", heads=[1], first_position=1, num_positions=2)
    assert page.values is None
    assert (page.first_position, page.heads) == (1, (1,))
    assert torch.equal(page.keys, whole.keys[:, 1:3, [1]])


@pytest.mark.parametrize("name", STORAGES)
def test_stored_numbers_lie_on_the_grid_of_their_type(name):
    rows = 3 * torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    kept = store(rows, name)
    assert torch.equal(store(kept, name), kept) or name == "int8"
    steps = rows.abs().amax(-1, keepdim=True) / 127
    largest = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}
    bound = steps / 2 if name == "int8" else rows.abs() * largest[name] + 2**-10 * (name == "float8_e4m3fn")
    assert bool(((kept - rows).abs() <= bound * 1.001 + 1e-7 * (name != "float32")).all())
    assert torch.equal(store(rows, None), rows)


@pytest.mark.parametrize(
    "options",
    [{"layer": 3}, {"parts": "some"}, {"heads": [2]}, {"heads": []}, {"first_position": 4}, {"dtype": "int3"}],
)
def test_what_is_not_there_is_refused(tiny_llama, options):
    with pytest.raises(InputError):
        observe_cache(tiny_llama, TEXTS, **options)
