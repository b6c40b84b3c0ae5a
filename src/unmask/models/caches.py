"""A model's own cache of keys and values: filled by one forward pass, and read in the forms that transformers keeps.

Known forms: a cache with layers (dynamic, static, sliding, quantised), the cache of an encoder–decoder (its decoder's
own part), and tuples of (keys, values). Heads come as (batch, groups, length, e) and are handed out as rows of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError
from unmask.models.adapter import Model
from unmask.shapes import MaskBatch, TokenBatch

CachedHeads = tuple[Float[Tensor, "batch length g e"], Float[Tensor, "batch length g e"]]


@torch.no_grad()
def fill_cache(model: Model, tokens: TokenBatch, mask: MaskBatch | None = None) -> Any:
    """The cache that the model keeps of texts, as transformers makes it."""
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    returned = model.body(input_ids=tokens, attention_mask=mask.long(), use_cache=True)
    cache = getattr(returned, "past_key_values", None)
    if cache is None:
        raise InputError(
            f"this {model.family} model has no cache of keys and values; load a decoder, for example smollm2-135m"
        )
    return cache


def read_cache(cache: Any, layer: int) -> CachedHeads:
    """Keys and values of a block, with a row for each token."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", cache)
    if not hasattr(layers, "__getitem__") or not 0 <= layer < len(layers):
        raise InputError(f"this {type(cache).__name__} has no layer {layer} with keys and values")
    entry = layers[layer]
    pair = (entry[0], entry[1]) if isinstance(entry, (tuple, list)) else _layer_tensors(entry)
    if not all(isinstance(part, Tensor) and part.ndim == 4 for part in pair):
        raise InputError(
            f"layer {layer} of this {type(cache).__name__} holds no keys and values of shape (batch, heads, length, "
            "width): a block without attention, a cache that is empty, or one that is compressed"
        )
    length = pair[0].shape[2]
    if not isinstance(entry, (tuple, list)) and hasattr(entry, "get_seq_length"):
        length = min(length, int(entry.get_seq_length()) or length)  # a static cache is longer than its text
    keys, values = (part[:, :, :length].transpose(1, 2) for part in pair)
    return keys, values


def _layer_tensors(entry: Any) -> tuple[Any, Any]:
    """Keys and values of one layer; of a quantised one the stored part is multiplied out, and the rest is behind it."""
    pair = getattr(entry, "keys", None), getattr(entry, "values", None)
    stored = getattr(entry, "_quantized_keys", None), getattr(entry, "_quantized_values", None)
    if stored[0] is None:
        return pair
    parts = [entry._dequantize(part) for part in stored]
    return tuple(  # type: ignore[return-value]
        torch.cat([whole, rest.to(whole)], 2) if isinstance(rest, Tensor) and rest.ndim == 4 and rest.numel() else whole
        for whole, rest in zip(parts, pair, strict=True)
    )
