"""Which tokens, at which positions, can be inputs of the first block: all whose vector lies in the gradient's span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.linalg.gap import FLOAT32_FLOOR, Gap, widest_gap
from unmask.linalg.subspace import Span
from unmask.models.adapter import Model

# Only candidates nearer than this fraction of a typical wrong distance get the full float64 test.
_SHORTLIST = 0.5


@dataclass(frozen=True)
class Candidates:
    """Tokens that may stand at a position. `gap` separates their distances from those of all other tokens."""

    by_position: Mapping[int, Tensor]  # position → tokens; the key −1 stands for 'every position'
    gap: Gap
    num_tested: int
    unseen: frozenset[int] = frozenset()  # candidates that this evidence cannot show, present or not

    def at(self, position: int) -> Tensor:
        """Tokens that may stand at a position; none beyond the longest text."""
        if -1 in self.by_position:
            return self.by_position[-1]
        return self.by_position.get(position, torch.zeros(0, dtype=torch.long))

    @property
    def tokens(self) -> frozenset[int]:
        """The bag of words: every token that was seen to stand anywhere."""
        return frozenset(int(token) for tokens in self.by_position.values() for token in tokens) - self.unseen


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
        gap = widest_gap(distances, ceiling, floor) if gap is None else gap.narrowed(distances)
        if not bool((distances <= gap.threshold).any()):
            break
        shortlists[position] = tokens, distances
    assert gap is not None  # a model has at least one position
    passing = {p: tokens[distances <= gap.threshold] for p, (tokens, distances) in shortlists.items()}
    by_position = passing if model.learned_positions else {-1: passing.get(0, torch.zeros(0, dtype=torch.long))}
    return Candidates(by_position, gap, model.vocab_size * (position + 1))


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
