"""Softmax attention as models compute it: softmax(scale·q·k)·v, several query heads for each key and value head.

Notation: h query heads in g groups of r = h/g, e a head's width; o = h·e, heads side by side.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def attend(
    queries: Float[Tensor, "*batch q h e"],
    keys: Float[Tensor, "*batch j g e"],
    values: Float[Tensor, "*batch j g e"],
    visible: Bool[Tensor, "*batch q j"],
    scale: float,
) -> Float[Tensor, "*batch q o"]:
    """What every query reads from the keys that it may see."""
    repeats = queries.shape[-2] // keys.shape[-2]
    keys, values = (part.repeat_interleave(repeats, dim=-2) for part in (keys, values))
    scores = torch.einsum("...qhe,...jhe->...hqj", queries, keys) * scale
    scores = scores.masked_fill(~visible[..., None, :, :], torch.finfo(scores.dtype).min)
    return torch.einsum("...hqj,...jhe->...qhe", scores.softmax(-1), values).flatten(-2)


def attend_behind(
    queries: Float[Tensor, "c h e"],
    own_keys: Float[Tensor, "c g e"],
    own_values: Float[Tensor, "c g e"],
    keys: Float[Tensor, "s j g e"],
    values: Float[Tensor, "s j g e"],
    scale: float,
) -> Float[Tensor, "s c o"]:
    """What each of c candidates reads behind each of s prefixes: the prefix, and itself, with one softmax over both."""
    grouped = queries.unflatten(1, (own_keys.shape[1], -1)) * scale
    before = torch.einsum("cgre,sjge->scgrj", grouped, keys)
    itself = torch.einsum("cgre,cge->cgr", grouped, own_keys).expand(len(keys), -1, -1, -1)
    weights = torch.cat([before, itself[..., None]], dim=-1).softmax(-1)
    mixed = torch.einsum("scgrj,sjge->scgre", weights[..., :-1], values)
    return (mixed + weights[..., -1:] * own_values[:, :, None]).flatten(2)
