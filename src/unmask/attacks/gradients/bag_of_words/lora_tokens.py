"""The bag of words from low-rank adapters: y = W·x + s·B·(A·x) in block 0's queries, keys and values.

Two gradients leave the client, and each sees the inputs through the rank r:

    ∂L/∂B = s·∂L/∂Yᵀ·(X·Aᵀ)     its row space is that of X·Aᵀ, in r dimensions: 'does A·x lie in it?'
    ∂L/∂A = s·Bᵀ·∂L/∂Yᵀ·X       its row space lies in that of X, in d dimensions, but has at most r of them

At initialisation B = 0, so ∂L/∂A = 0 and only the first speaks. Either tells tokens only while the batch has fewer
distinct inputs than directions can show: r for ∂B, r times the number of adapted projections for ∂A.

Limits: with r or more distinct (token, position) inputs every token passes, and nothing is claimed.
Source: DAGER's span test (arXiv 2405.15586) behind the adapter's projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates, filter_tokens
from unmask.evidence.gradients import GradientEvidence
from unmask.linalg.gap import Gap, widest_gap
from unmask.linalg.subspace import Span, column_span
from unmask.models.adapter import Model
from unmask.models.linear import Role

_FLOOR = 1e-6  # what float32 leaves of a zero once a vector went through A
_FAR = 0.1


@dataclass(frozen=True)
class LoraTokens:
    """Candidates with the tensors they rest on; or, if there are none, why."""

    candidates: Candidates | None
    used: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class _Factors:
    """An adapted projection of block 0: A (r, d), and the span of the rows of X·Aᵀ in r dimensions."""

    name: str
    down: Float[Tensor, "r d"]
    span: Span


@torch.no_grad()
def find_lora_tokens(
    evidence: GradientEvidence, model: Model, num_probes: int, generator: torch.Generator
) -> LoraTokens:
    """Tokens by ∂A if it holds anything, else by ∂B."""
    inputs = {
        name: gradient.T
        for name in _factors(model, "A")
        if (gradient := evidence.gradients.get(name)) is not None and bool(gradient.any())
    }
    seen = list(_outputs(evidence, model))
    if not inputs and not seen:
        return LoraTokens(None, (), "no adapter of block 0's queries, keys or values holds a gradient")
    if inputs:
        span = column_span(*inputs.values())
        if span.rank < span.max_rank:
            found = filter_tokens(model, span, num_probes=num_probes, generator=generator)
            return LoraTokens(found, tuple(inputs))
    open_ones = [one for one in _without_blind_ones(model, seen) if one.span.rank < one.span.width]
    if open_ones:
        return LoraTokens(_passing(model, open_ones), tuple(one.name for one in open_ones))
    rank = max(one.span.width for one in seen) if seen else span.max_rank
    return LoraTokens(
        None,
        (*inputs, *(one.name for one in seen)),
        f"adapters of this rank show {rank} directions at most and all are in use: the batch has at least as many "
        "distinct inputs, and every token passes",
    )


def _factors(model: Model, factor: str) -> list[str]:
    """Names of the adapters' factors at block 0's queries, keys and values; a fused projection once."""
    layers = (model.linear(role, 0) for role in (Role.QUERY, Role.KEY, Role.VALUE))
    modules = dict.fromkeys(layer.parameter.removesuffix(".weight") for layer in layers if layer is not None)
    return [f"{module}.lora_{factor}.weight" for module in modules]


def _outputs(evidence: GradientEvidence, model: Model) -> Iterator[_Factors]:
    for down, up in zip(_factors(model, "A"), _factors(model, "B"), strict=True):
        gradient, weights = evidence.gradients.get(up), evidence.adapters.get(down)
        if gradient is not None and weights is not None and bool(gradient.any()):
            yield _Factors(up, weights, column_span(gradient.T))


def _without_blind_ones(model: Model, seen: list[_Factors]) -> list[_Factors]:
    """In a causal model the query gradient of a first token is zero; values see every token."""
    layer = model.linear(Role.VALUE, 0)
    sees_all = [one for one in seen if layer and one.name.startswith(layer.parameter.removesuffix(".weight"))]
    return sees_all if model.causal and sees_all else seen


def _passing(model: Model, seen: list[_Factors]) -> Candidates:
    """All tokens whose A·x lies in every projection's span, position by position until none passes."""
    positions = range(model.max_positions if model.learned_positions else 1)
    matrix = torch.cat([one.down.T for one in seen], dim=1).to(model.device, model.dtype)
    sizes = [one.span.width for one in seen]
    distances: dict[int, Tensor] = {}
    gap: Gap | None = None
    for position, projected in zip(positions, model.project_first_inputs(matrix, positions), strict=True):
        parts = zip(seen, projected.split(sizes, dim=1), strict=True)
        worst = torch.stack([one.span.distance(part) for one, part in parts]).amax(0)
        gap = widest_gap(worst, _FAR, _FLOOR) if gap is None else gap.narrow(worst)
        if not bool((worst <= gap.threshold).any()):
            break
        distances[position] = worst
    assert gap is not None  # a model has at least one position
    passing = {p: (worst <= gap.threshold).nonzero()[:, 0] for p, worst in distances.items()}
    by_position = passing if model.learned_positions else {-1: passing.get(0, torch.zeros(0, dtype=torch.long))}
    return Candidates(by_position, gap, model.vocab_size * (position + 1))
