"""Outputs of layers whose weights are known: hidden states of a model, or of one attention layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence.files import reads, require_finite, write
from unmask.models.adapter import Model
from unmask.shapes import MaskBatch, States


@dataclass(frozen=True)
class HiddenEvidence:
    """The residual stream after `layer` blocks (0: the embeddings), without the final norm, for padded texts."""

    states: States
    mask: MaskBatch
    layer: int
    model_fingerprint: str

    def __post_init__(self) -> None:
        require_finite({"states": self.states})
        if self.states.ndim != 3 or self.mask.shape != self.states.shape[:2]:
            raise EvidenceError(
                f"states must be (batch, length, width) and mask (batch, length), got {tuple(self.states.shape)} "
                f"and {tuple(self.mask.shape)}"
            )

    def check(self, model: Model) -> None:
        """Refuse states of another model or of a layer that it does not have."""
        if self.model_fingerprint != model.fingerprint():
            raise EvidenceError(
                f"these states were made with a model of fingerprint {self.model_fingerprint[:12]}, but the model "
                f"given has {model.fingerprint()[:12]}; load the weights that produced them"
            )
        if self.states.shape[2] != model.width or not 0 <= self.layer <= model.num_blocks:
            raise EvidenceError(
                f"states of width {self.states.shape[2]} after layer {self.layer} do not fit a model of width "
                f"{model.width} with {model.num_blocks} blocks"
            )

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        tensors = {"states": self.states, "mask": self.mask}
        return write(path, "hidden", tensors, {"layer": self.layer, "model_fingerprint": self.model_fingerprint})


@dataclass(frozen=True)
class AttentionEvidence:
    """Y = softmax(scale·X W Xᵀ)·X·V of one attention layer, rows being tokens; X is the secret."""

    W: Float[Tensor, "d d"]
    V: Float[Tensor, "d e"]
    output: Float[Tensor, "n e"]
    causal: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        require_finite({"W": self.W, "V": self.V, "output": self.output})
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

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        tensors = {"W": self.W, "V": self.V, "output": self.output}
        return write(path, "attention", tensors, {"causal": self.causal, "scale": self.scale})


@reads("hidden")
def _read_hidden(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> HiddenEvidence:
    return HiddenEvidence(tensors["states"], tensors["mask"], int(header["layer"]), str(header["model_fingerprint"]))


@reads("attention")
def _read_attention(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> AttentionEvidence:
    return AttentionEvidence(
        tensors["W"], tensors["V"], tensors["output"], bool(header["causal"]), float(header["scale"])
    )
