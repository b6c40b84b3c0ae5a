"""Which tokens, at which positions, can be inputs of the first block: all whose vector lies in the gradient's span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unmask.linalg.gap import FLOAT32_FLOOR, Gap, widest_gap
from unmask.linalg.near_rows import near_rows
from unmask.linalg.subspace import Span
from unmask.models.adapter import Model

# Only candidates nearer than this fraction of a typical wrong distance get the full float64 test.
_SHORTLIST = 0.5
# Embeddings that differ by less leave rows that differ by less, which noise and rounding may hide.
EQUAL = 1e-2
# Differences of which less than usual lies outside the span, and inputs that are longer than embeddings.
_REACH = 4.0


@dataclass(frozen=True)
class Candidates:
    """Tokens that may stand at a position. `gap` separates their distances from those of all other tokens.

    Tokens with equal embeddings are one class: no forward pass tells them apart, so the search has one of them, and
    `equal` maps it to all. `told_apart` says that the evidence still tells which of a class occur (embedding rows do).
    """

    by_position: Mapping[int, Tensor]  # position → tokens; the key −1 stands for 'every position'
    gap: Gap
    num_tested: int
    unseen: frozenset[int] = frozenset()  # candidates that may occur or not: this evidence does not show it
    equal: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    told_apart: bool = False
    reach: float = 0.0  # how far from a token that occurs another one may be and seem to occur as well

    def at(self, position: int) -> Tensor:
        """Tokens that may stand at a position; none beyond the longest text."""
        if -1 in self.by_position:
            return self.by_position[-1]
        return self.by_position.get(position, torch.zeros(0, dtype=torch.long))

    @property
    def searched(self) -> frozenset[int]:
        """Every token that was seen to stand anywhere, one for each class."""
        return frozenset().union(*(tokens.tolist() for tokens in self.by_position.values())) - self.unseen

    @property
    def tokens(self) -> frozenset[int]:
        """The bag of words: every token that occurs. Of a class of equal tokens that cannot be told apart, none."""
        if self.told_apart:
            return self.searched.union(*self.equal.values()) - self.unseen
        return self.searched - set(self.equal)

    @property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Classes of equal tokens of which some occur, and it cannot be told which."""
        return () if self.told_apart else tuple(self.equal[token] for token in sorted(self.searched & set(self.equal)))


def merge_equal(candidates: Candidates, model: Model, told_apart: bool) -> Candidates:
    """The candidates with one token for each class of nearly equal embeddings."""
    tokens = torch.tensor(sorted(candidates.searched | candidates.unseen), dtype=torch.long)
    rows = model.parameter(model.token_embedding).detach()[tokens.to(model.device)]
    reach = max(EQUAL, candidates.reach, candidates.gap.threshold)
    near = near_rows(rows, range(len(tokens)), EQUAL if told_apart else reach)
    first = {int(tokens[place]): int(tokens[min(others)]) for place, others in near.items()}
    equal: dict[int, list[int]] = {}
    for token, representative in first.items():
        while first[representative] != representative:  # near rows are not transitive, classes are
            representative = first[representative]
        first[token] = representative
        equal.setdefault(representative, []).append(token)
    classes = {token: tuple(sorted(members)) for token, members in equal.items() if len(members) > 1}
    if not classes:
        return replace(candidates, told_apart=told_apart)
    merged = {
        position: torch.tensor(sorted({first[int(t)] for t in kept}), dtype=torch.long).to(kept)
        for position, kept in candidates.by_position.items()
    }
    return replace(candidates, by_position=merged, equal=classes, told_apart=told_apart)


@torch.no_grad()
def filter_tokens(
    model: Model, span: Span, *, num_probes: int, generator: torch.Generator, floor: float = FLOAT32_FLOOR
) -> Candidates:
    """All tokens whose block-0 input lies in `span`, for every position where positions are learned.

    Rotary models have one vector a token. With learned positions the pairs (token, position) are tested position by
    position until none passes: the longest text fills every position from 0 on.
    Limits: with learned positions and repeated words, a batch's token may pass at positions where it does not stand,
    because token + position is a sum and the span is closed under sums; a later test must decide the position.
    Cost: vocab·d·k multiplications, then vocab·k a position; float64 distances for the shortlist only.
    Source: DAGER, arXiv 2405.15586, Algorithm 1.
    """
    probes = span.probes(num_probes, generator).to(model.device, model.dtype)
    positions = range(model.max_positions if model.learned_positions else 1)
    shortlists: dict[int, tuple[Tensor, Tensor]] = {}
    gap: Gap | None = None
    for position, projected in zip(positions, model.project_first_inputs(probes, positions), strict=True):
        tokens, distances, ceiling = _shortlist(model, span, projected, position)
        gap = widest_gap(distances, ceiling, floor) if gap is None else gap.narrow(distances)
        if not bool((distances <= gap.threshold).any()):
            break
        shortlists[position] = tokens, distances
    assert gap is not None  # a model has at least one position
    passing = {p: tokens[distances <= gap.threshold] for p, (tokens, distances) in shortlists.items()}
    by_position = passing if model.learned_positions else {-1: passing.get(0, torch.zeros(0, dtype=torch.long))}
    hidden = ((span.width - span.rank) / span.width) ** 0.5  # how much of a random difference lies outside the span
    reach = _REACH * gap.threshold / max(hidden, 1e-9)
    return Candidates(by_position, gap, model.vocab_size * (position + 1), reach=reach)


def _shortlist(model: Model, span: Span, projected: Tensor, position: int) -> tuple[Tensor, Tensor, float]:
    """Tokens whose estimate is small, their float64 distances, and a distance that only wrong tokens reach."""
    estimates = projected.norm(dim=1)
    cut = _SHORTLIST * float(estimates.median())
    tokens = (estimates < cut).nonzero()[:, 0]
    rows = model.first_input(tokens, torch.full_like(tokens, position))
    return tokens, span.distance(rows), cut / _typical_norm(model, position)


def _typical_norm(model: Model, position: int) -> float:
    tokens = torch.arange(0, model.vocab_size, max(1, model.vocab_size // 64), device=model.device)
    return float(model.first_input(tokens, torch.full_like(tokens, position)).norm(dim=1).mean())
