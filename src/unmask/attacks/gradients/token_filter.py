"""Which tokens, at which positions, can be inputs of the first block: all whose vector lies in the gradient's span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.linalg.gap import Gap, widest_gap
from unmask.linalg.subspace import Span
from unmask.models.adapter import Model

# Only candidates nearer than this fraction of a typical wrong distance get the full float64 test.
_SHORTLIST = 0.5
_POSITIONS_AT_ONCE = 16


@dataclass(frozen=True)
class Candidates:
    """Tokens that may stand at a position. `gap` separates their distances from those of all other tokens."""

    by_position: Mapping[int, Tensor]  # position → tokens; the key −1 stands for 'every position'
    gap: Gap
    num_tested: int

    def at(self, position: int) -> Tensor:
        """Tokens that may stand at a position; none beyond the longest text."""
        if -1 in self.by_position:
            return self.by_position[-1]
        return self.by_position.get(position, torch.zeros(0, dtype=torch.long))

    @property
    def tokens(self) -> frozenset[int]:
        """The bag of words: every token that may stand anywhere."""
        return frozenset(int(token) for tokens in self.by_position.values() for token in tokens)


@torch.no_grad()
def filter_tokens(model: Model, span: Span, *, num_probes: int, generator: torch.Generator) -> Candidates:
    """All tokens whose block-0 input lies in `span`, for every position where positions are learned.

    Rotary models have one vector a token. With learned positions the pairs (token, position) are tested position by
    position until none passes: the longest text fills every position from 0 on.
    Limits: with learned positions and repeated words, a batch's token may pass at positions where it does not stand,
    because token + position is a sum and the span is closed under sums; a later test must decide the position.
    Cost: vocab·d·k multiplications, then vocab·k a position; float64 distances for the shortlist only.
    Source: DAGER, arXiv 2405.15586, Algorithm 1.
    """
    probes = span.probes(num_probes, generator).to(model.device, model.dtype)
    if not model.learned_positions:
        only_gap, found = _passing(model, span, probes, [0], None)
        return Candidates({-1: found[0]}, only_gap, model.vocab_size)
    by_position: dict[int, Tensor] = {}
    gap: Gap | None = None
    for start in range(0, model.max_positions, _POSITIONS_AT_ONCE):
        positions = range(start, min(start + _POSITIONS_AT_ONCE, model.max_positions))
        gap, found = _passing(model, span, probes, positions, gap)
        filled = [len(found[position]) > 0 for position in positions]
        end = filled.index(False) if False in filled else len(filled)
        by_position.update({position: found[position] for position in positions[:end]})
        if end < len(filled):
            break
    assert gap is not None  # a model has at least one position
    return Candidates(by_position, gap, model.vocab_size * (start + len(positions)))


def _passing(
    model: Model, span: Span, probes: Tensor, positions: range | list[int], gap: Gap | None
) -> tuple[Gap, dict[int, Tensor]]:
    """Tokens within the gap's threshold at each position, and the gap after seeing all of their distances."""
    shortlists: dict[int, tuple[Tensor, Tensor]] = {}
    ceiling = float("inf")
    for position, projected in zip(positions, model.project_first_inputs(probes, positions), strict=True):
        estimates = projected.norm(dim=1)
        cut = _SHORTLIST * float(estimates.median())
        tokens = (estimates < cut).nonzero()[:, 0]
        rows = model.first_input(tokens, torch.full_like(tokens, position))
        shortlists[position] = tokens, span.distance(rows)
        scale = float(
            model.first_input(torch.arange(64, device=model.device), _constant(position, model)).norm(dim=1).mean()
        )
        ceiling = min(ceiling, cut / scale)
    distances = torch.cat([distance for _, distance in shortlists.values()])
    gap = widest_gap(distances, ceiling) if gap is None else gap.narrowed(distances)
    return gap, {p: tokens[distance <= gap.threshold] for p, (tokens, distance) in shortlists.items()}


def _constant(position: int, model: Model) -> Tensor:
    return torch.full((64,), position, device=model.device)
