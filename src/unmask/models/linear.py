"""The linear layers of a block, by what they do, and where a family keeps each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from jaxtyping import Float
from torch import Tensor


class Role(Enum):
    """The linear layers of a block, by what they do."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_OUT = "attention_out"
    MLP_IN = "mlp_in"
    MLP_GATE = "mlp_gate"
    MLP_OUT = "mlp_out"


@dataclass(frozen=True)
class LinearLayer:
    """Where one linear layer lives: its parameter, how it is stored, and which output columns are its own."""

    parameter: str
    stored_transposed: bool
    columns: Sequence[int] | None = None  # a range where they lie side by side

    @property
    def module(self) -> str:
        """The layer's name."""
        return self.parameter.rpartition(".")[0]

    def orient(self, stored: Tensor) -> Float[Tensor, "d_in d_out"]:
        """A weight or gradient as (d_in, d_out), whatever the family stores."""
        whole = stored.T if self.stored_transposed else stored
        if self.columns is None:
            return whole
        if isinstance(self.columns, range):
            return whole[:, self.columns.start : self.columns.stop]
        return whole[:, list(self.columns)]


@dataclass(frozen=True)
class TokenHead:
    """z ↦ φ(z)·Eᵀ + b: logits over the vocabulary, given the stream z that leaves the last block."""

    features: Callable[[Tensor], Tensor]
    embedding: Float[Tensor, "vocab d"]
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n vocab"]:
        """Logits of each row."""
        logits = self.features(states) @ self.embedding.T
        return self.bounded(logits if self.bias is None else logits + self.bias)

    def bounded(self, outputs: Float[Tensor, "*n vocab"]) -> Float[Tensor, "*n vocab"]:
        """Logits, given what the output layer puts out."""
        logits = outputs if self.scale == 1 else outputs * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def times_slopes(self, rows: Float[Tensor, "*n k"], logits: Float[Tensor, "*n #k"] | None) -> Float[Tensor, "*n k"]:
        """Rows times how fast logits grow with what the output layer puts out; only capped ones must be known."""
        rows = rows if self.scale == 1 else rows * self.scale
        if self.softcap is None:
            return rows
        assert logits is not None
        return rows * (1 - (logits / self.softcap).square())
