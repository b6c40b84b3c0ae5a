"""Outputs of layers whose weights are known: hidden states of a model, or of one attention layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.arguments import named_dtype, require_count, require_fingerprint, require_member, require_token_ids
from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError
from unmask.evidence.files import reads, write
from unmask.evidence.tensors import (
    AS_HELD,
    as_floats,
    as_tensor,
    in_half_precision,
    require_floats,
    require_padded,
    stated_precision,
)
from unmask.models.adapter import Model
from unmask.models.load import require_model
from unmask.shapes import MaskBatch, States

_NORMED = 0.05  # of a row's norm: how far it may be off a normalised one


class Site(Enum):
    """Where in the model the states were taken."""

    STREAM = "stream"  # the residual stream after `layer` blocks; 0: the embeddings
    FINAL_NORM = "final_norm"  # after all blocks and the final norm: transformers' `last_hidden_state`
    ATTENTION = "attention"  # what the attention module of block `layer` adds to the stream, output projection included
    MEAN = "mean"  # the mean over a text's tokens of the stream after `layer` blocks, one row a text


@dataclass(frozen=True, repr=False)
class HiddenEvidence(DisplayedFields):
    """States of padded texts, taken at a site of a known model.

    Side knowledge of the adversary: `compute_dtype`, the precision in which the service runs its model, and
    `known_beginning`, tokens that every text begins with (a chat template, a system prompt).
    """

    states: States
    mask: MaskBatch
    layer: int
    model_fingerprint: str
    site: Site = Site.STREAM
    compute_dtype: torch.dtype = AS_HELD
    known_beginning: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_fingerprint(self.model_fingerprint, EvidenceError)
        known = require_token_ids("known_beginning", self.known_beginning, EvidenceError)
        object.__setattr__(self, "known_beginning", known)
        object.__setattr__(self, "site", require_member(Site, "site", self.site, EvidenceError))
        require_count("layer", self.layer, least=0, error=EvidenceError)
        expected = "states must be (batch, length, width) and mask (batch, length)"
        held, mask = require_padded({"states": self.states}, self.mask, 3, expected)
        object.__setattr__(self, "states", held["states"])
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "compute_dtype", stated_precision(self.compute_dtype, held.values()))

    @classmethod
    def of(
        cls,
        model: Model,
        states: Any,
        *,
        layer: int | None = None,
        site: Site | str | None = None,
        mask: Any = None,
        attention_mask: Any = None,
        compute_dtype: torch.dtype | str | None = None,
        known_beginning: Sequence[int] = (),
    ) -> HiddenEvidence:
        """Wrap what `model(…, output_hidden_states=True)` returns, all layers' states, or one layer's.

        One layer's are (batch, length, width), of a single text also (length, width); means are a row a text. `layer`
        counts the blocks that they have passed (0: embeddings). Without a site they are the stream, and behind the last
        block they are looked at: most families return them after the final norm. `mask` (or
        `attention_mask`) is the tokenizer's; without it every position is a token. What is not stated of
        `compute_dtype` is the states' own half precision, else that of the model.
        """
        require_model(model, EvidenceError)
        known = None if site is None else require_member(Site, "site", site, EvidenceError)
        require_count("layer", layer, least=0, error=EvidenceError)
        if known is Site.FINAL_NORM and layer is None:
            layer = model.num_blocks
        chosen, layer = _choose_layer(model, states, layer)
        rows = as_floats("states", chosen)
        rows = rows.unsqueeze(1 if known is Site.MEAN else 0) if rows.ndim == 2 else rows
        if rows.ndim != 3 or 0 in rows.shape:
            raise EvidenceError(
                f"states must be (batch, length, width) with at least one row, got {tuple(rows.shape)}; one text is a "
                "batch of one"
            )
        if known is Site.MEAN and rows.shape[1] != 1:
            raise EvidenceError(f"means are one row a text, (texts, width), got {tuple(rows.shape)}")
        if known is None:
            known = Site.FINAL_NORM if layer == model.num_blocks and _is_normed(model, rows) else Site.STREAM
        mask = attention_mask if mask is None else mask
        given = torch.ones(rows.shape[:2], dtype=torch.bool) if mask is None else as_tensor("mask", mask)
        given = given[None] if given.ndim == 1 else given
        precision = stated_precision(compute_dtype, [in_half_precision(rows)], otherwise=model.dtype)
        evidence = cls(rows.clone(), given, layer, model.fingerprint(), known, precision, tuple(known_beginning))
        evidence.check(model)
        return evidence

    def check(self, model: Model) -> None:
        """Refuse states of another model or of a layer that it does not have."""
        if self.model_fingerprint != model.fingerprint():
            raise EvidenceError(
                f"these states were made with a model of fingerprint {self.model_fingerprint[:12]}, but the model "
                f"given has {model.fingerprint()[:12]}; load the weights that produced them"
            )
        if max(self.known_beginning, default=0) >= model.vocab_size:
            raise EvidenceError(f"known_beginning holds tokens beyond the vocabulary of {model.vocab_size}")
        last = model.num_blocks - (self.site is Site.ATTENTION)
        width = model.final_width if self.site is Site.FINAL_NORM else model.width
        first = last if self.site is Site.FINAL_NORM else 0
        if not first <= self.layer <= last:
            allowed = f"{last} after the final norm" if first else f"0…{last}"
            raise EvidenceError(f"layer must be {allowed} for states of this {model.family} model, got {self.layer}")
        if self.states.shape[2] != width:
            advice = "load the model that made them"
            if self.states.shape[2] == model.vocab_size:
                advice = "logits are as wide as the vocabulary: wrap them with `unmask wrap logits`, one row a prompt"
            elif width in self.states.shape[:2]:
                advice = "the last axis is the width: transpose them to (batch, length, width)"
            raise EvidenceError(
                f"the states {tuple(self.states.shape)} are {self.states.shape[2]} numbers wide and this "
                f"{model.family} model makes {width}; {advice}"
            )

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The state of each token, named by its text and position, as defences change them."""
        return {f"{text:06d}/{position:06d}": self.states[text, position] for text, position in self.mask.nonzero()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> HiddenEvidence:
        """The same evidence with these states of its tokens; padding is zero."""
        states = torch.zeros_like(self.states)
        for name, state in tensors.items():
            text, position = map(int, name.split("/"))
            states[text, position] = state
        return replace(self, states=states)

    def to(self, device: str | torch.device) -> HiddenEvidence:
        """The same states on another device."""
        return replace(self, states=self.states.to(device), mask=self.mask.to(device))

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        tensors = {"states": self.states, "mask": self.mask}
        header = {
            "layer": self.layer,
            "model_fingerprint": self.model_fingerprint,
            "site": self.site.value,
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "known_beginning": list(self.known_beginning),
        }
        return write(path, "hidden", tensors, header)


@dataclass(frozen=True, repr=False)
class AttentionEvidence(DisplayedFields):
    """Y = softmax(scale·X W Xᵀ)·X·V of one attention layer, rows being tokens; X is the secret.

    Side knowledge of the adversary: `row_norms`, the norm of each token (√d behind an RMS norm without gains).
    """

    W: Float[Tensor, "d d"]
    V: Float[Tensor, "d e"]
    output: Float[Tensor, "n e"]
    causal: bool = False
    scale: float = 1.0
    row_norms: Float[Tensor, " n"] | None = None

    def __post_init__(self) -> None:
        for name, tensor in require_floats({"W": self.W, "V": self.V, "output": self.output}).items():
            object.__setattr__(self, name, tensor)
        shapes = self.W.shape, self.V.shape, self.output.shape
        fit = all(len(shape) == 2 for shape in shapes) and (
            shapes[0][0] == shapes[0][1] == shapes[1][0] and shapes[1][1] == shapes[2][1]
        )
        if not math.isfinite(self.scale):
            raise EvidenceError(f"the scale of the scores must be finite, got {self.scale}")
        if not fit:
            raise EvidenceError(
                "expected W (d, d), V (d, e) and output (n, e), got "
                f"{tuple(self.W.shape)}, {tuple(self.V.shape)} and {tuple(self.output.shape)}"
            )
        object.__setattr__(self, "row_norms", require_norms(self.row_norms, len(self.output)))

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The output of each token, named by its position, as defences change them."""
        return {f"{position:06d}": row for position, row in enumerate(self.output)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> AttentionEvidence:
        """The same evidence with these outputs of its tokens."""
        return replace(self, output=torch.stack([tensors[name] for name in sorted(tensors)]))

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        tensors = {"W": self.W, "V": self.V, "output": self.output}
        tensors |= {} if self.row_norms is None else {"row_norms": self.row_norms}
        return write(path, "attention", tensors, {"causal": self.causal, "scale": self.scale})


def require_norms(norms: Tensor | None, n: int) -> Tensor | None:
    """One positive norm a row, or None."""
    if norms is None:
        return None
    norms = require_floats({"row_norms": norms})["row_norms"]
    if norms.shape != (n,) or not norms.is_floating_point() or not (norms > 0).all():
        raise EvidenceError(
            f"row_norms must be {n} positive numbers, one for each row of the output, got "
            f"{norms.dtype} of shape {tuple(norms.shape)}; leave them out if they are not known"
        )
    return norms


def _choose_layer(model: Model, states: Any, layer: int | None) -> tuple[Any, int]:
    """One layer's states, and how many blocks they have passed."""
    last = model.num_blocks
    held = getattr(states, "hidden_states", None)
    if held is None and isinstance(states, Mapping):
        held = states.get("last_hidden_state")
        if held is None or layer not in (None, last):
            raise EvidenceError(
                f"this {type(states).__name__} holds no states of each layer; call the model with "
                "output_hidden_states=True"
            )
        return held, last
    layers = states if held is None else held
    is_listed = isinstance(layers, (list, tuple))
    if is_listed and layers and isinstance(layers[0], (list, tuple)) and isinstance(layers[0][0], Tensor):
        raise EvidenceError(
            "these are the states of each step of generate; join those of one layer, "
            "torch.cat([step[layer] for step in hidden_states], 1)"
        )
    if getattr(layers, "ndim", 0) != 4 and not (is_listed and all(getattr(part, "ndim", 0) == 3 for part in layers)):
        if layer is None:
            raise EvidenceError(f"layer must be stated: how many blocks the states have passed, 0…{last}")
        return layers, layer
    if len(layers) != last + 1:
        raise EvidenceError(
            f"these are states of {len(layers)} layers, and this {model.family} model makes {last + 1} (embeddings and "
            f"{last} blocks); load the model that made them, or give one layer's"
        )
    if layer is None or layer > last:
        wanted = "stated, " if layer is None else ""
        got = "" if layer is None else f", got {layer}"
        raise EvidenceError(f"layer must be {wanted}0…{last}: which of the {last + 1} layers' states to read{got}")
    return layers[layer], layer


@torch.no_grad()
def _is_normed(model: Model, rows: States) -> bool:
    """Whether rows have passed the final norm: without its gains and bias, they are what it makes of them again."""
    if rows.shape[2] != model.width:
        return rows.shape[2] == model.final_width
    x = rows.to(model.device, model.dtype)
    x = x[x.isfinite().all(2) & x.any(2)]
    signs = torch.ones(model.width, device=x.device, dtype=x.dtype)
    signs[1::2] = -1
    plus, minus = model.final_norm(signs), model.final_norm(-signs)
    if torch.allclose(model.final_norm(2 * signs), 2 * plus):
        return False  # there is no norm, and the two sites are one
    bias, gains = (plus + minus) / 2, (plus - minus) / 2 * signs
    again = model.final_norm(torch.where(gains.abs() > 1e-6, (x - bias) / gains, 0.0))
    return float(((again - x).norm(dim=1) / x.norm(dim=1)).median()) < _NORMED


@reads("hidden")
def _read_hidden(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> HiddenEvidence:
    return HiddenEvidence(
        tensors["states"],
        tensors["mask"],
        int(header["layer"]),
        str(header["model_fingerprint"]),
        Site(header.get("site", Site.STREAM.value)),
        named_dtype(header.get("compute_dtype", "float32")),
        tuple(int(token) for token in header.get("known_beginning", ())),
    )


@reads("attention")
def _read_attention(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> AttentionEvidence:
    return AttentionEvidence(
        tensors["W"],
        tensors["V"],
        tensors["output"],
        bool(header["causal"]),
        float(header["scale"]),
        tensors.get("row_norms"),
    )
