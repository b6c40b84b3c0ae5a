"""Random ReLU networks and one-layer transformers, and oracles that answer for them with plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.relu import ReluNetwork


def relu_network(
    hidden: Float[Tensor, "m d"],
    output: Float[Tensor, " m"],
    hidden_bias: Float[Tensor, " m"] | None = None,
    output_bias: float = 0.0,
) -> ReluNetwork:
    """The description of Σ_j output_j·relu(hidden_jᵀx + hidden_bias_j) + output_bias, in float64."""
    B, a = hidden.detach().double(), output.detach().double()
    biases = hidden_bias is not None
    if hidden_bias is not None:
        B = torch.cat([B, hidden_bias.detach().double()[:, None]], dim=1)
    normals = a[:, None] * B
    linear = normals.sum(dim=0)
    if biases:
        linear[-1] += 2 * output_bias
    elif output_bias:
        raise InputError(f"output_bias is {output_bias}, but hidden_bias is None; give both, zeros where there is none")
    return ReluNetwork(normals, a.sign(), linear, biases)


@dataclass(frozen=True)
class Layers:
    """A network as it is written down in papers: B, a and, perhaps, biases."""

    hidden: Tensor
    output: Tensor
    hidden_bias: Tensor | None = None
    output_bias: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        inside = x @ self.hidden.to(x).T
        inside = inside if self.hidden_bias is None else inside + self.hidden_bias.to(x)
        return inside.relu() @ self.output.to(x) + self.output_bias

    @property
    def described(self) -> ReluNetwork:
        return relu_network(self.hidden, self.output, self.hidden_bias, self.output_bias)


def normal(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_layers(width: int, num_neurons: int, seed: int = 0, biases: bool = False) -> Layers:
    draw = normal(seed)
    hidden, output = draw(num_neurons, width) / width**0.5, draw(num_neurons) / num_neurons**0.5
    return Layers(hidden, output, 0.3 * draw(num_neurons), 0.7) if biases else Layers(hidden, output)


def even_layers(width: int, num_neurons: int, seed: int = 0) -> Layers:
    """φ(−x) = φ(x): every neuron with its mirror image, so that Σ a_j·b_j = 0."""
    half = random_layers(width, num_neurons // 2, seed)
    return Layers(torch.cat([half.hidden, -half.hidden]), half.output.repeat(2))


def oracle_of_network(layers: Layers, dtype: torch.dtype = torch.float64, budget: int | None = None) -> OracleEvidence:
    return evidence_of(lambda X: layers(X[:, 0].to(dtype)), layers.hidden.shape[1], budget)


def evidence_of(function: Callable[[Tensor], Tensor], width: int, budget: int | None = None) -> OracleEvidence:
    return OracleEvidence(FunctionOracle(function), width, Ledger(budget=budget))


@dataclass(frozen=True)
class Transformer:
    """f(X) = φ(Σ_h V_hᵀ Σ_i softmax_i(x_iᵀ W_h x_n)·x_i), in any arithmetic."""

    W: Tensor
    V: Tensor
    layers: Layers

    def __call__(self, X: Tensor) -> Tensor:
        scores = torch.einsum("bnd,hde,be->bhn", X, self.W.to(X), X[:, -1])
        return self.layers(torch.einsum("bhn,bnd,hde->be", scores.softmax(dim=2), X, self.V.to(X)))

    def evidence(self, dtype: torch.dtype = torch.float64, budget: int | None = None) -> OracleEvidence:
        return evidence_of(lambda X: self(X.to(dtype)), self.W.shape[1], budget)


def random_transformer(num_heads: int, width: int, layers: Layers, seed: int = 0) -> Transformer:
    draw = normal(100 + seed)
    return Transformer(draw(num_heads, width, width) / width**0.5, draw(num_heads, width, width) / width**0.5, layers)


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())
