"""Outputs of layers whose weights are known: hidden states of a model, or of one attention layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.arguments import named_dtype, require_count, require_member, require_token_ids
from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError
from unmask.evidence.files import reads, write
from unmask.evidence.tensors import AS_HELD, require_floats, require_padded, stated_precision
from unmask.models.adapter import Model
from unmask.shapes import MaskBatch, States


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
        known = require_token_ids("known_beginning", self.known_beginning, EvidenceError)
        object.__setattr__(self, "known_beginning", known)
        object.__setattr__(self, "site", require_member(Site, "site", self.site, EvidenceError))
        require_count("layer", self.layer, least=0, error=EvidenceError)
        expected = "states must be (batch, length, width) and mask (batch, length)"
        held, mask = require_padded({"states": self.states}, self.mask, 3, expected)
        object.__setattr__(self, "states", held["states"])
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "compute_dtype", stated_precision(self.compute_dtype, held.values()))

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
        if self.states.shape[2] != width or not 0 <= self.layer <= last:
            raise EvidenceError(
                f"states of width {self.states.shape[2]} after layer {self.layer} do not fit a model of width "
                f"{width} with {model.num_blocks} blocks"
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
