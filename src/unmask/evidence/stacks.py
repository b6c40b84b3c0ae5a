"""The output of bare attention layers one after the other, whose weights are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError
from unmask.evidence.files import reads, write
from unmask.evidence.outputs import AttentionEvidence, require_norms
from unmask.evidence.tensors import require_floats


@dataclass(frozen=True, repr=False)
class AttentionLayer(DisplayedFields):
    """X ↦ softmax(scale·X W Xᵀ)·X·V."""

    W: Float[Tensor, "d d"]
    V: Float[Tensor, "d e"]
    causal: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, tensor in require_floats({"W": self.W, "V": self.V}).items():
            object.__setattr__(self, name, tensor)

    def evidence(self, output: Float[Tensor, "n e"], row_norms: Float[Tensor, " n"] | None = None) -> AttentionEvidence:
        """What is seen if this layer alone gave the output."""
        return AttentionEvidence(self.W, self.V, output, self.causal, self.scale, row_norms)


@dataclass(frozen=True, repr=False)
class AttentionStackEvidence(DisplayedFields):
    """What the last of some attention layers gives; each reads what the one before it gives, the first one X.

    Side knowledge of the adversary: `row_norms`, the norm of each row of X.
    """

    layers: tuple[AttentionLayer, ...]
    output: Float[Tensor, "n e"]
    row_norms: Float[Tensor, " n"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "output", require_floats({"output": self.output})["output"])
        if not self.layers or self.output.ndim != 2:
            raise EvidenceError(
                f"expected at least one layer and an output (n, e), got {len(self.layers)} layers and an output of "
                f"shape {tuple(self.output.shape)}"
            )
        object.__setattr__(self, "row_norms", require_norms(self.row_norms, len(self.output)))
        widths = [*(len(layer.W) for layer in self.layers[1:]), self.output.shape[1]]
        for index, (layer, width) in enumerate(zip(self.layers, widths, strict=True)):
            try:
                layer.evidence(self.output.new_zeros(len(self.output), width))
            except EvidenceError as fault:
                raise EvidenceError(f"layer {index} does not fit what comes after it: {fault}") from fault

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        tensors = {"output": self.output}
        tensors |= {} if self.row_norms is None else {"row_norms": self.row_norms}
        for index, layer in enumerate(self.layers):
            tensors |= {f"layers.{index}.W": layer.W, f"layers.{index}.V": layer.V}
        header = {"causal": [layer.causal for layer in self.layers], "scale": [layer.scale for layer in self.layers]}
        return write(path, "attention_stack", tensors, header)


@reads("attention_stack")
def _read_stack(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> AttentionStackEvidence:
    masks = zip(header["causal"], header["scale"], strict=True)
    layers = tuple(
        AttentionLayer(tensors[f"layers.{index}.W"], tensors[f"layers.{index}.V"], bool(causal), float(scale))
        for index, (causal, scale) in enumerate(masks)
    )
    return AttentionStackEvidence(layers, tensors["output"], tensors.get("row_norms"))
