"""A serving stack's cache: keys and values that one block keeps, of all heads or some, of all positions or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.arguments import named_dtype, require_count, require_fingerprint, require_token_ids
from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError, InputError
from unmask.evidence.files import reads, write
from unmask.evidence.tensors import AS_HELD, as_tensor, in_half_precision, require_padded, stated_precision
from unmask.models.adapter import Model
from unmask.models.caches import read_cache
from unmask.models.load import require_model
from unmask.shapes import MaskBatch
from unmask.wording import count_noun

_PARTS = ("keys", "values")
_EXPECTED = "keys and values must be (batch, heads, length, width) of one batch, and the mask (batch, length)"


@dataclass(frozen=True, repr=False)
class CacheEvidence(DisplayedFields):
    """Keys (as scores read them: after rotary) and values of block `layer`, or one of the two.

    `heads` are the key/value heads that are seen. Column j is at position `first_position` + j; where that is not 0,
    only a page of the cache is seen. Side knowledge of the adversary: `compute_dtype`, the precision in which the
    service runs its model, and `known_beginning`, tokens that every text begins with, from position 0 on.
    """

    keys: Float[Tensor, "batch length g e"] | None
    values: Float[Tensor, "batch length g e"] | None
    mask: MaskBatch
    layer: int
    heads: tuple[int, ...]
    model_fingerprint: str
    first_position: int = 0
    compute_dtype: torch.dtype = AS_HELD
    known_beginning: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_fingerprint(self.model_fingerprint, EvidenceError)
        known = require_token_ids("known_beginning", self.known_beginning, EvidenceError)
        object.__setattr__(self, "known_beginning", known)
        object.__setattr__(self, "heads", require_token_ids("heads", self.heads, EvidenceError))
        require_count("layer", self.layer, least=0, error=EvidenceError)
        require_count("first_position", self.first_position, least=0, error=EvidenceError)
        if not self.parts:
            raise EvidenceError("a cache must hold keys, values or both, got neither")
        expected = (
            f"keys and values must be (batch, length, heads, width) with {len(self.heads)} heads, and mask (batch, "
            "length); transformers keeps (batch, heads, length, width): use CacheEvidence.of"
        )
        held, mask = require_padded(self.parts, self.mask, 4, expected)
        if any(tensor.shape[2] != len(self.heads) for tensor in held.values()):
            raise EvidenceError(f"{expected}, got {', '.join(f'{n} {tuple(t.shape)}' for n, t in held.items())}")
        for name, tensor in {**held, "mask": mask}.items():
            object.__setattr__(self, name, tensor)
        object.__setattr__(self, "compute_dtype", stated_precision(self.compute_dtype, held.values()))
        if len(set(self.heads)) != len(self.heads):
            raise EvidenceError(f"heads must be different ones, got {self.heads}")

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """What is seen, by name: 'keys', 'values' or both."""
        seen = {"keys": self.keys, "values": self.values}
        return {name: tensor for name, tensor in seen.items() if tensor is not None}

    @classmethod
    def of(
        cls,
        model: Model,
        cache: Any,
        *,
        layer: int,
        heads: Sequence[int] | None = None,
        mask: Any = None,
        attention_mask: Any = None,
        first_position: int = 0,
        compute_dtype: torch.dtype | str | None = None,
        known_beginning: Sequence[int] = (),
    ) -> CacheEvidence:
        """Wrap a cache of transformers, or 'keys' and/or 'values' of one block, each (batch, heads, length, width).

        Integers must have been multiplied with their scales. `heads` names those that the tensors hold, in order; a
        whole cache is cut to them. `mask` (or `attention_mask`) is the tokenizer's; without it every position is a
        token. Cut left padding off, if the service counts positions from a text's first token. What is not stated of
        `compute_dtype` is the cache's own half precision, else that of the model.
        """
        require_model(model, EvidenceError)
        if isinstance(cache, Mapping):
            unknown = sorted(set(cache) - set(_PARTS))
            if unknown:
                raise EvidenceError(f"a cache's tensors are 'keys' and 'values', got {unknown}; rename them")
            seen = {name: _rows(name, as_tensor(name, part)) for name, part in cache.items() if part is not None}
        else:
            try:
                seen = dict(zip(_PARTS, read_cache(cache, layer), strict=True))
            except InputError as error:
                raise EvidenceError(str(error)) from None
        if not seen:
            raise EvidenceError("a cache must hold keys, values or both, got neither")
        if not model.causal:
            raise EvidenceError(f"this {model.family} model is an encoder, which keeps no cache; load a decoder")
        shape, held = next(iter(seen.values())).shape[:3], next(iter(seen.values())).shape[2]
        if 0 in shape or any(part.shape[:3] != shape for part in seen.values()):
            raise EvidenceError(f"{_EXPECTED}, with at least one of each, got {_shapes(seen)}")
        chosen = tuple(range(held)) if heads is None else tuple(heads)
        if len(chosen) < held and max(chosen, default=0) < held:
            seen = {name: part[:, :, list(chosen)] for name, part in seen.items()}
        elif len(chosen) != held:
            raise EvidenceError(f"heads must name the {held} heads that the tensors hold, got {list(chosen)}")
        mask = attention_mask if mask is None else mask
        known = torch.ones(shape[:2], dtype=torch.bool) if mask is None else as_tensor("mask", mask)
        if known.shape != shape[:2]:
            raise EvidenceError(f"{_EXPECTED}, got {_shapes(seen)} and a mask {tuple(known.shape)}")
        keys, values = (None if name not in seen else seen[name].detach().clone() for name in _PARTS)
        precision = stated_precision(compute_dtype, map(in_half_precision, seen.values()), otherwise=model.dtype)
        evidence = cls(
            keys, values, known, layer, chosen, model.fingerprint(), first_position, precision, tuple(known_beginning)
        )
        evidence.check(model)
        return evidence

    def check(self, model: Model) -> None:
        """Refuse a cache of another model, of a block or of positions that it lacks, or of other heads."""
        if self.model_fingerprint != model.fingerprint():
            raise EvidenceError(
                f"this cache was made with a model of fingerprint {self.model_fingerprint[:12]}, but the model given "
                f"has {model.fingerprint()[:12]}; load the weights that produced it"
            )
        if self.layer >= model.num_blocks:
            raise EvidenceError(f"block {self.layer} is one that this model lacks: it has 0…{model.num_blocks - 1}")
        end = self.first_position + self.mask.shape[1]
        if end > model.max_positions:
            raise EvidenceError(
                f"the cache ends behind position {end - 1:,}, and this model takes {model.max_positions:,} tokens at "
                "most: correct first_position, or load the model that made it"
            )
        if max(self.known_beginning, default=0) >= model.vocab_size:
            raise EvidenceError(f"known_beginning holds tokens beyond the vocabulary of {model.vocab_size}")
        layout = model.layout.blocks[self.layer].layout
        widths = {"keys": layout.head_width, "values": layout.value_width}
        for name, part in self.parts.items():
            if part.shape[3] != widths[name] or max(self.heads) >= layout.num_key_value_heads:
                raise EvidenceError(
                    f"{name} of {count_noun(len(self.heads), 'head')} (up to number {max(self.heads)}) with width "
                    f"{part.shape[3]} do not fit block {self.layer}, whose {layout.num_key_value_heads} key/value "
                    f"heads have {name} of width {widths[name]}; load the model that made them, and give (batch, "
                    "heads, length, width)"
                )

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Each head's keys and values of each token, as defences change them: one scale a token and head."""
        return {
            f"{text:06d}/{column:06d}/{head:04d}/{name}": part[text, column, head]
            for name, part in self.parts.items()
            for text, column in self.mask.nonzero().tolist()
            for head in range(part.shape[2])
        }

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> CacheEvidence:
        """The same cache with these rows; padding is zero."""
        parts = {name: torch.zeros_like(part) for name, part in self.parts.items()}
        for name, row in tensors.items():
            text, column, head, part = name.split("/")
            parts[part][int(text), int(column), int(head)] = row
        return replace(self, keys=parts.get("keys"), values=parts.get("values"))

    def to(self, device: str | torch.device) -> CacheEvidence:
        """The same cache on another device."""
        moved = {name: part.to(device) for name, part in self.parts.items()}
        return replace(self, keys=moved.get("keys"), values=moved.get("values"), mask=self.mask.to(device))

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        header = {
            "layer": self.layer,
            "heads": list(self.heads),
            "first_position": self.first_position,
            "model_fingerprint": self.model_fingerprint,
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "known_beginning": list(self.known_beginning),
        }
        return write(path, "cache", {**self.parts, "mask": self.mask}, header)


def _shapes(seen: Mapping[str, Tensor]) -> str:
    """As they were handed over."""
    return ", ".join(f"{name} {tuple(part.transpose(1, 2).shape)}" for name, part in seen.items())


def _rows(name: str, part: Tensor) -> Float[Tensor, "batch length g e"]:
    """A row for each token, of (batch, heads, length, width) as transformers keeps it."""
    if part.ndim != 4:
        raise EvidenceError(
            f"{name} must be (batch, heads, length, width), got {tuple(part.shape)}; one text is a batch of one"
        )
    return part.transpose(1, 2)


@reads("cache")
def _read_cache(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> CacheEvidence:
    return CacheEvidence(
        tensors.get("keys"),
        tensors.get("values"),
        tensors["mask"],
        int(header["layer"]),
        tuple(int(head) for head in header["heads"]),
        str(header["model_fingerprint"]),
        int(header["first_position"]),
        named_dtype(header["compute_dtype"]),
        tuple(int(token) for token in header["known_beginning"]),
    )
