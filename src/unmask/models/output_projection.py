"""The linear layer that ends an attention module, in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.models.adapter import Model
from unmask.models.linear import Role


@dataclass(frozen=True)
class OutputProjection:
    """m ↦ m·W_O + b: what an attention module adds to the stream, given the mixed values."""

    weight: Float[Tensor, "o d"]
    bias: Float[Tensor, " d"]

    @classmethod
    def of(cls, model: Model, block: int) -> OutputProjection:
        """Of one block, in the model's precision."""
        layer, weight = model.linear(Role.ATTENTION_OUT, block), model.weight(Role.ATTENTION_OUT, block)
        assert layer is not None  # every family has an output projection
        assert weight is not None
        known = dict(model.named_parameters())
        bias = known.get(layer.parameter.removesuffix("weight") + "bias")
        return cls(weight.detach(), weight.new_zeros(weight.shape[1]) if bias is None else bias.detach())

    @property
    def condition(self) -> float:
        """κ(W_O); ∞ where the mixed values are not determined by the output."""
        values = torch.linalg.svdvals(self.weight.double())
        determined = self.weight.shape[0] <= self.weight.shape[1] and float(values[-1]) > 0
        return float(values[0] / values[-1]) if determined else float("inf")

    def __call__(self, mixed: Float[Tensor, "*n o"]) -> Float[Tensor, "*n d"]:
        """The module's output for mixed values."""
        return mixed @ self.weight + self.bias

    def invert(self, outputs: Float[Tensor, "n d"]) -> Float[Tensor, "n o"]:
        """Mixed values from the module's output."""
        return torch.linalg.lstsq(self.weight.T, (outputs - self.bias).T).solution.T
