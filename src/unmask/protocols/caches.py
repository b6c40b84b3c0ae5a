"""A serving stack keeps the keys and values of texts that it has read, in some type, and parts of them get out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.arguments import require_count
from unmask.errors import InputError
from unmask.evidence.caches import CacheEvidence
from unmask.models.adapter import Model
from unmask.models.caches import fill_cache, read_cache
from unmask.models.load import require_model
from unmask.protocols.batch import Texts, make_batch, require_memory

Parts = Literal["both", "keys", "values"]
PARTS: tuple[Parts, ...] = ("both", "keys", "values")
# int8 has one scale for each token and head; the others are plain casts, as servers do them.
STORAGES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")
}


@torch.no_grad()
def observe_cache(
    model: Model,
    texts: Texts,
    *,
    layer: int = 0,
    parts: Parts = "both",
    heads: Sequence[int] | None = None,
    first_position: int = 0,
    num_positions: int | None = None,
    dtype: torch.dtype | str | None = None,
    max_length: int | None = None,
) -> CacheEvidence:
    """What block `layer` keeps of texts in the cache that the model itself fills; padding is zeroed.

    `heads`: key/value heads that are seen, all by default. `first_position` and `num_positions`: the page that is seen.
    `dtype`: the type that the cache is stored in, that of the model by default; values come back on its grid.
    Texts are cut to `max_length` tokens.
    """
    require_model(model)
    require_count("layer", layer, least=0)
    require_count("first_position", first_position, least=0)
    require_count("num_positions", num_positions)
    if parts not in PARTS:
        raise InputError(f"parts must be one of {', '.join(PARTS)}, got {parts!r}")
    if layer >= model.num_blocks:
        raise InputError(f"layer must lie in 0…{model.num_blocks - 1}, got {layer}")
    batch = make_batch(model, texts, max_length=max_length)
    require_memory(model, *batch.tokens.shape, backward=False)
    length = batch.tokens.shape[1]
    if first_position >= length:
        raise InputError(f"first_position must be below {length}, the length of the longest text, got {first_position}")
    end = length if num_positions is None else min(length, first_position + num_positions)
    keys, values = read_cache(fill_cache(model, batch.tokens, batch.mask), layer)
    if keys.shape[1] != length:
        raise InputError(f"block {layer}'s cache keeps {keys.shape[1]} of {length} positions (a sliding window)")
    number, mask = keys.shape[2], batch.mask[:, first_position:end]
    chosen = tuple(range(number)) if heads is None else tuple(heads)
    if not chosen or not all(type(head) is int and 0 <= head < number for head in chosen):
        raise InputError(f"heads must be some of 0…{number - 1}, got {heads!r}")
    seen = {"keys": keys, "values": values}
    stored = {
        name: store(part[:, first_position:end, list(chosen)] * mask[..., None, None], dtype)
        for name, part in seen.items()
        if parts in ("both", name)
    }
    return CacheEvidence(
        stored.get("keys"),
        stored.get("values"),
        mask,
        layer,
        chosen,
        model.fingerprint(),
        first_position,
        model.dtype,
    )


def store(part: Float[Tensor, "*n e"], dtype: torch.dtype | str | None) -> Float[Tensor, "*n e"]:
    """Numbers as a type keeps them, in the type that they had; float8 ends at 448."""
    if dtype is None:
        return part
    name = str(dtype).removeprefix("torch.")
    if name not in STORAGES:
        raise InputError(f"a cache is stored as {', '.join(STORAGES)}, got {dtype!r}")
    if name == "int8":
        wide = part.double()
        scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float64).tiny)
        return ((wide / scale).round() * scale).to(part.dtype)
    top = torch.finfo(STORAGES[name]).max
    return part.clamp(-top, top).to(STORAGES[name]).to(part.dtype)
