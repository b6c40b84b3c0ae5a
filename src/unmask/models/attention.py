"""Softmax attention as models compute it: softmax(scale·q·k)·v, several query heads for each key and value head.

Notation: h query heads in g groups of r = h/g, e a head's width; o = h·e, heads side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """From queries and keys to scores: scale·q·k, bounded by `softcap`·tanh(·/softcap), plus what positions add.

    `sinks` are the scores of reading nothing, one a head.
    """

    scale: float
    softcap: float | None = None
    has_bias: bool = False
    sinks: tuple[float, ...] | None = None

    def bound(self, scores: Tensor) -> Tensor:
        """Scores that no query can exceed."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def weights(self, scores: Float[Tensor, "*n j"], head_axis: int) -> Float[Tensor, "*n j"]:
        """The softmax over keys; what goes to a sink is left out."""
        if self.sinks is None:
            return scores.softmax(-1)
        shape = [1] * scores.dim()
        shape[head_axis] = len(self.sinks)
        sink = scores.new_tensor(self.sinks).view(shape).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


def attend(
    queries: Float[Tensor, "*batch q h e"],
    keys: Float[Tensor, "*batch j g e"],
    values: Float[Tensor, "*batch j g e"],
    visible: Bool[Tensor, "*batch q j"],
    rule: Scores,
    bias: Float[Tensor, "h q j"] | None = None,
) -> Float[Tensor, "*batch q o"]:
    """What every query reads from the keys that it may see."""
    repeats = queries.shape[-2] // keys.shape[-2]
    if repeats > 1:
        keys, values = (part.repeat_interleave(repeats, dim=-2) for part in (keys, values))
    scores = rule.bound(torch.einsum("...qhe,...jhe->...hqj", queries, keys) * rule.scale)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~visible[..., None, :, :], torch.finfo(scores.dtype).min)
    weights = rule.weights(scores, head_axis=-3)
    return torch.einsum("...hqj,...jhe->...qhe", weights, values).flatten(-2)


def attend_behind(
    queries: Float[Tensor, "c h e"],
    own_keys: Float[Tensor, "c g e"],
    own_values: Float[Tensor, "c g e"],
    keys: Float[Tensor, "s j g e"],
    values: Float[Tensor, "s j g e"],
    rule: Scores,
    bias: Float[Tensor, "h j"] | None = None,
    through: Float[Tensor, "o k"] | None = None,
) -> Float[Tensor, "s c o"] | Float[Tensor, "s c k"]:
    """What each of c candidates reads behind each of s prefixes: the prefix, and itself, with one softmax over both.

    `through`: a matrix M that the result is multiplied by. Values meet it before they are mixed, which for a few
    columns is much less work: the rows of width o are never there.
    """
    grouped = queries.unflatten(1, (own_keys.shape[1], -1)) * rule.scale
    before = torch.einsum("cgre,sjge->scgrj", grouped, keys)
    itself = torch.einsum("cgre,cge->cgr", grouped, own_keys).expand(len(keys), -1, -1, -1)
    scores = rule.bound(torch.cat([before, itself[..., None]], dim=-1))
    scores = scores if bias is None else scores + bias.unflatten(0, (own_keys.shape[1], -1))
    weights = rule.weights(scores.flatten(2, 3), head_axis=-2).view_as(scores)
    before, itself = weights[..., :-1], weights[..., -1]
    if through is None:
        mixed = torch.einsum("scgrj,sjge->scgre", before, values)
        return (mixed + itself[..., None] * own_values[:, :, None]).flatten(2)
    by_head = through.unflatten(0, (*grouped.shape[1:3], -1))
    moved = torch.einsum("sjge,grek->sgrjk", values, by_head)
    own = torch.einsum("cge,grek->cgrk", own_values, by_head)
    return torch.einsum("scgrj,sgrjk->sck", before, moved) + torch.einsum("scgr,cgrk->sck", itself, own)
