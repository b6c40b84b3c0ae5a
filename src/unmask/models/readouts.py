"""What is seen of the stream behind l blocks: itself, behind the final norm, or as block l's keys and values.

    stream   s = x            behind the norm   s = N(x)            cache   s = [k(x, p) ; v(x)],  heads side by side

Candidates are compared in s as it is stored. Templates are fitted at position 0, so keys are brought there before
they are ranked. How positions enter keys is measured, and no family is named: for random rows x the keys at p are a
linear function of those at 0,

    k(x, p) = k(x, 0)·M_p,    M_p by least squares for each head, residual zero

which is a rotation for rotary positions, of a part of the entries for partial ones, and the identity where positions
are learned or are added to scores. A position that is not linear is reported (`problem`).

Keys and values may differ in size by a factor of thirty, and each head may be stored with a scale of its own, so heads
are compared each by its own norm: s is divided by the norms of the heads that were seen. Trained models write numbers
into a few entries of the stream that are thousands of times larger than the others (attention sinks). They say little
of the token and are most of the norm, so entries are compared as if none were larger than `_LARGEST` typical ones.

Notation: x (n, d) the stream, p its position, s (n, m) what is seen of it, e the width of a head.
Cost: one attention call of e + 8 rows a position, kept while the model lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.errors import InputError
from unmask.models.adapter import Model
from unmask.models.caches import fill_cache, read_cache
from unmask.models.model_cache import compute_once

_SPARE_ROWS = 8  # beyond the width of a head: they tell whether the map is linear
_LINEAR = 1e-3  # of the keys' norm; float32 leaves 1e-6, a condition number of 100 more
_LEAST_NORM = 1e-4  # of the longest head's: a head that is zero is not divided by zero
_LARGEST = 8.0  # medians: one Gaussian number in ten million is larger
_SHORTEST = 1e-30  # a norm to divide by
_CHECKED = 12  # tokens that a model's own cache is compared on


@dataclass(frozen=True)
class Readout:
    """The stream itself."""

    def __call__(
        self, model: Model, stream: Float[Tensor, "*n d"], positions: Int[Tensor, "*n"]
    ) -> Float[Tensor, "*n m"]:
        """What is seen of rows of the stream."""
        return stream

    def align(self, model: Model, seen: Float[Tensor, "n m"], positions: Int[Tensor, " n"]) -> Float[Tensor, "n m"]:
        """What would be seen of the same rows at position 0."""
        return seen

    def weights(self, model: Model, seen: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """The factors that entries are compared with: below 1 for those that are far larger than the others."""
        sizes = seen.abs()
        typical = torch.where(sizes > 0, sizes, torch.nan).nanmedian(dim=1, keepdim=True).values
        return (_LARGEST * typical / sizes).clamp(max=1.0).nan_to_num(1.0)

    def split(self, model: Model, width: int) -> tuple[int, ...]:
        """Widths of the parts that are stored each with a scale of their own."""
        return (width,)

    @property
    def is_stream(self) -> bool:
        """Whether the blocks behind can be run on what is seen."""
        return True


@dataclass(frozen=True)
class NormReadout(Readout):
    """The stream behind the model's final norm."""

    def __call__(
        self, model: Model, stream: Float[Tensor, "*n d"], positions: Int[Tensor, "*n"]
    ) -> Float[Tensor, "*n m"]:
        """The normed rows."""
        return model.final_norm(stream)


@dataclass(frozen=True)
class CacheReadout(Readout):
    """Keys and values of some heads of block `layer`, those of a head side by side, keys first."""

    layer: int
    heads: tuple[int, ...]
    keys: bool = True
    values: bool = True

    def __call__(
        self, model: Model, stream: Float[Tensor, "*n d"], positions: Int[Tensor, "*n"]
    ) -> Float[Tensor, "*n m"]:
        """What the cache holds of rows that enter the block at some positions."""
        rows = model.attention_input(self.layer, stream)
        _, keys, values = model.queries_keys_values(self.layer, rows, positions)
        chosen = list(self.heads)
        parts = [part[..., chosen, :] for part, used in ((keys, self.keys), (values, self.values)) if used]
        return torch.cat([part.flatten(-2) for part in parts], -1)

    @property
    def is_stream(self) -> bool:
        """The stream cannot be made from one block's keys and values."""
        return False

    def split(self, model: Model, width: int) -> tuple[int, ...]:
        """One part for each head's keys, then one for each head's values."""
        number = len(self.heads)
        key_width, value_width = head_widths(model, self.layer)
        return (key_width,) * number * self.keys + (value_width,) * number * self.values

    def weights(self, model: Model, seen: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """One over the norm of each head's keys, and of its values, at each position."""
        widths = self.split(model, seen.shape[1])
        norms = torch.stack([part.norm(dim=1) for part in seen.split(widths, dim=1)], 1)
        norms = norms.maximum(_LEAST_NORM * norms.amax(1, keepdim=True))
        norms = torch.where(norms > 0, norms, torch.ones_like(norms))  # a token whose row is zero
        return (1 / norms).repeat_interleave(torch.tensor(widths, device=seen.device), dim=1)

    def align(self, model: Model, seen: Float[Tensor, "n m"], positions: Int[Tensor, " n"]) -> Float[Tensor, "n m"]:
        """Keys moved back to position 0; values as they are."""
        if not self.keys:
            return seen
        number, width = len(self.heads), head_widths(model, self.layer)[0]
        keys, values = seen[:, : number * width].unflatten(1, (number, width)), seen[:, number * width :]
        maps = position_maps(model, self.layer, positions.tolist())
        back = torch.stack([each.back[list(self.heads)] for each in maps])
        return torch.cat([torch.einsum("nge,ngef->ngf", keys, back.to(keys)).flatten(1), values], 1)

    def problem(self, model: Model, positions: Int[Tensor, " n"]) -> str:
        """Why what is seen cannot be read at these positions; empty if it can."""
        if why := compute_once(model, ("cache problem", self.layer), lambda: _cache_problem(model, self.layer)):
            return why
        if not self.keys:
            return ""
        for p, each in zip(positions.tolist(), position_maps(model, self.layer, positions.tolist()), strict=True):
            off = each.residual
            if not off <= _LINEAR:
                return (
                    f"keys at position {p} are no linear function of those at position 0 (off by {off:.1e} of their "
                    "norm), so they cannot be ranked; give the values alone"
                )
        return ""


STREAM = Readout()
FINAL_NORM = NormReadout()


@dataclass(frozen=True)
class PositionMap:
    """The inverse of the map from keys at position 0 to keys at another one, and how far from linear it is."""

    back: Float[Tensor, "g e e"]
    residual: float


def position_maps(model: Model, layer: int, positions: Sequence[int]) -> list[PositionMap]:
    """The maps of a block's keys at some positions, each measured once."""
    known: dict[int, PositionMap] = compute_once(model, ("position maps", layer), dict)
    for position in positions:
        if position not in known:
            known[position] = _measure_map(model, layer, position)
    return [known[position] for position in positions]


def head_widths(model: Model, layer: int) -> tuple[int, int]:
    """Widths of one head's keys and of its values."""
    nothing = torch.zeros(0, model.width, dtype=model.dtype, device=model.device)
    _, keys, values = model.queries_keys_values(layer, nothing, torch.zeros(0, dtype=torch.long))
    return keys.shape[-1], values.shape[-1]


@torch.no_grad()
def _measure_map(model: Model, layer: int, position: int) -> PositionMap:
    width = head_widths(model, layer)[0]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * width + _SPARE_ROWS, model.width, generator=generator).to(model.device, model.dtype)

    def keys_at(place: int) -> Float[Tensor, "g n e"]:
        where = torch.full((len(rows),), place, device=model.device)
        return model.queries_keys_values(layer, rows, where)[1].double().transpose(0, 1)

    here, there = keys_at(0), keys_at(position)
    back = torch.linalg.lstsq(there, here).solution
    off = (there @ back - here).norm() / here.norm().clamp_min(_SHORTEST)
    return PositionMap(back, float(off))


@torch.no_grad()
def _cache_problem(model: Model, layer: int) -> str:
    """Whether the model's own cache holds the keys and values that its softmax reads."""
    generator = torch.Generator().manual_seed(1)
    length = min(_CHECKED, model.max_positions)
    tokens = torch.randint(0, model.vocab_size, (1, length), generator=generator).to(model.device)
    try:
        found = read_cache(fill_cache(model, tokens), layer)
    except InputError as error:
        return str(error)
    positions = torch.arange(length, device=model.device)[None]
    rows = model.attention_input(layer, model.hidden_states(tokens, num_blocks=layer)[layer])
    expected = model.queries_keys_values(layer, rows, positions)[1:]
    for name, ours, theirs in zip(("keys", "values"), expected, found, strict=True):
        if theirs.shape != ours.shape or float((theirs - ours).norm()) > _LINEAR * float(ours.norm()):
            return (
                f"block {layer}'s cache does not hold the {name} that its softmax reads (it holds "
                f"{tuple(theirs.shape[1:])}, the softmax reads {tuple(ours.shape[1:])}): a compressed cache is not "
                "covered"
            )
    return ""
