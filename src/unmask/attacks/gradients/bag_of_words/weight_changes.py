"""Differences of block 0's weights, and how precisely they tell the steps of AdamW, one or several.

    step = −(Δ + (1 − s^K)·W)/η,   s = 1 − η·decay,   σ = a unit in the last place of W·√(K/12)/η + K·2e-7

Notation: Δ = new − old (m, d), rows being combinations of the inputs; W the weights before; K steps of learning rate η;
s as float32 has it, which makes a usual decay some percent larger or smaller.
Limits: weights that blocks share show the sum of all blocks' gradients, and are left out. A decay that nobody states is
read off one step alone, where it has one digit and the learning rate two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.lora_tokens import input_factors
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.models.linear import Role

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, as every library has them
_EDGE, _EDGE_ROUNDS = 1e-4, 40  # of the largest step: what ends the edge; rounds until it stands
_NEAR_RATE, _NEAR_DECAY = 1e-3, 0.03  # of usual numbers, as float32 has them
_ARITHMETIC = 2e-7  # of a step: what float32 leaves of Adam's own arithmetic


@dataclass(frozen=True)
class DeltaTokens:
    """Tokens that occur, the expected number of false ones, and the tensors they rest on; if there are none, why."""

    tokens: Int[Tensor, " n"]
    expected_false: float = 0.0
    used: tuple[str, ...] = ()
    details: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


def find_nothing(reason: str, used: tuple[str, ...] = (), details: Mapping[str, float] | None = None) -> DeltaTokens:
    """No tokens, and why."""
    return DeltaTokens(torch.zeros(0, dtype=torch.long), used=used, details=details or {}, reason=reason)


@dataclass(frozen=True)
class WeightChange:
    """A difference of weights, the weights before, and how many steps there were; the first may have no gradient."""

    name: str
    delta: Float[Tensor, "m d"]
    weights: Float[Tensor, "m d"]
    num_steps: int
    begins_at_zero: bool = False
    is_factor: bool = False

    @property
    def num_gradients(self) -> int:
        """Steps that had one."""
        return self.num_steps - self.begins_at_zero

    def read_step(self, learning_rate: float, weight_decay: float) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m d"]]:
        """The sum of Adam's steps in learning rates, without the decay, and the errors that rounding leaves."""
        before, change, number = self.weights.double(), self.delta.double(), self.num_steps
        kept = float(torch.tensor(1 - learning_rate * weight_decay, dtype=self.delta.dtype)) ** number
        step = -(change + (1 - kept) * before) / learning_rate
        roundings = self.num_gradients + (number if weight_decay else 0)  # decay is a product of its own, in every step
        rounding = last_place(before, before + change, self.delta.dtype) * math.sqrt(roundings / 12)
        return step, rounding / learning_rate + _ARITHMETIC * self.num_gradients


def layer_changes(evidence: GradientEvidence, model: Model) -> Iterator[WeightChange]:
    """Queries, keys and values of block 0, as far as the update holds them."""
    layers = (model.linear(role, 0) for role in (Role.QUERY, Role.KEY, Role.VALUE))
    for layer in {layer.parameter: layer for layer in layers if layer is not None}.values():
        delta, weights = evidence.gradients.get(layer.parameter), model.parameter(layer.parameter).detach()
        if delta is not None and not model.is_shared(0) and bool(delta.any()):
            delta, weights = (part if layer.stored_transposed else part.T for part in (delta, weights))
            yield WeightChange(layer.parameter, delta, weights, evidence.num_steps or 1)


def adapter_changes(evidence: GradientEvidence, model: Model) -> Iterator[WeightChange]:
    """Factors A: while B is zero, they have no gradient."""
    for down, up in zip(input_factors(model, "A"), input_factors(model, "B"), strict=True):
        delta = evidence.gradients.get(down)
        if delta is not None and down in evidence.adapters and up in evidence.adapters and bool(delta.any()):
            had_none = not bool(evidence.adapters[up].any())
            steps = evidence.num_steps or 1
            yield WeightChange(down, delta, evidence.adapters[down], steps, had_none, is_factor=True)


def largest_step(held: WeightChange) -> float:
    """The largest entry beyond what its own rounding may have added: small weights are rounded to hardly anything."""
    before, change = held.weights.double(), held.delta.double()
    sure = float((change.abs() - last_place(before, before + change, held.delta.dtype) / 2).max())
    return sure if sure > 0 else float(change.abs().max())


def measure_decay(held: WeightChange) -> tuple[float, float] | None:
    """Learning rate and weight decay of one step of AdamW that states neither; None where no usual numbers are near.

    |Δ| = η·(|φ| − decay·W·sign(Δ)), where |φ| is next to 1 for most entries and never more: an edge, linear in W.
    """
    before, change = held.weights.double(), held.delta.double()
    sizes, along = change.abs().flatten(), -(change.sign() * before).flatten()
    large = sizes > sizes.max() / 2
    errors = (last_place(before, before + change, held.delta.dtype).flatten() + _EDGE * sizes.max())[large]
    line = torch.stack([torch.ones_like(along), along], 1)[large] / errors[:, None]
    measured, is_edge = sizes[large] / errors, torch.ones_like(errors, dtype=torch.bool)
    for _ in range(_EDGE_ROUNDS):
        fit = torch.linalg.solve(line[is_edge].T @ line[is_edge], line[is_edge].T @ measured[is_edge])
        is_edge = measured - line @ fit > -1
    rate, shrinks = fit.tolist()
    rate, decay = float(f"{rate:.1e}"), float(f"{shrinks / rate:.0e}")
    kept = float(torch.tensor(1 - rate * decay, dtype=held.delta.dtype))
    is_near = abs(rate / fit[0].item() - 1) < _NEAR_RATE and abs((1 - kept) / shrinks - 1) < _NEAR_DECAY
    return (rate, decay) if shrinks > 0 and is_near else None


def last_place(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """A unit in the last place of the larger of two weights."""
    size = torch.maximum(before.abs(), after.abs()).clamp_min(1e-30)
    return torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(size))
