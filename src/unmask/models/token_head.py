"""The part of a model that predicts tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class TokenHead:
    """z ↦ φ(z)·Eᵀ + b: logits over the vocabulary, given the stream z that leaves the last block."""

    features: Callable[[Tensor], Tensor]
    embedding: Float[Tensor, "vocab d"]
    bias: Float[Tensor, " vocab"] | None = None

    def logits(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n vocab"]:
        """Logits of each row."""
        logits = self.features(states) @ self.embedding.T
        return logits if self.bias is None else logits + self.bias
