"""A model's own cache, in the forms that transformers keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from unmask.errors import InputError
from unmask.models.caches import fill_cache, read_cache

TOKENS = torch.tensor([[5, 17, 99, 17]])


def test_keys_and_values_are_rows_of_tokens(tiny_llama):
    keys, values = read_cache(fill_cache(tiny_llama, TOKENS), 1)
    assert keys.shape == values.shape == (1, 4, 2, 16)


def test_every_form_holds_the_same(tiny_llama):
    cache = fill_cache(tiny_llama, TOKENS)
    keys, values = read_cache(cache, 1)
    static = transformers.StaticCache(tiny_llama.hf.config, max_cache_len=9)
    with torch.no_grad():
        tiny_llama.hf(TOKENS, past_key_values=static, use_cache=True)
    tuples = tuple((layer.keys, layer.values) for layer in cache.layers)
    stored = SimpleNamespace(
        keys=cache.layers[1].keys[:, :, 3:],
        values=cache.layers[1].values[:, :, 3:],
        _quantized_keys=cache.layers[1].keys[:, :, :3],
        _quantized_values=cache.layers[1].values[:, :, :3],
        _dequantize=lambda part: part,
    )
    quantised = SimpleNamespace(layers=[None, stored])
    for form in (static, tuples, quantised, SimpleNamespace(self_attention_cache=cache)):
        again = read_cache(form, 1)
        torch.testing.assert_close(again[0], keys)
        torch.testing.assert_close(again[1], values)


def test_what_holds_no_heads_is_refused(tiny_llama, tiny_bert):
    with pytest.raises(InputError, match="no layer 9"):
        read_cache(fill_cache(tiny_llama, TOKENS), 9)
    with pytest.raises(InputError, match="no keys and values"):
        read_cache([(torch.zeros(2, 3), torch.zeros(2, 3))], 0)
    with pytest.raises(InputError, match=r"this bert model has no cache .*load a decoder"):
        fill_cache(tiny_bert, TOKENS)
