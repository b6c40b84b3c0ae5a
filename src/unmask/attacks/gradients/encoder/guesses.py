"""Texts that a search accepted or refused, where nothing confirms them."""

from __future__ import annotations

from collections.abc import Iterator

from unmask.attacks.claims import guess_texts
from unmask.attacks.gradients.encoder.search import EncoderSearch
from unmask.evidence.gradients import GradientEvidence
from unmask.recovery import RecoveredText

_ALIKE = 0.7  # guesses that share more than this part of their tokens count as one

TokenIds = tuple[int, ...]


def guess_found(evidence: GradientEvidence, search: EncoderSearch) -> tuple[RecoveredText, ...]:
    """Accepted texts, the nearest first, and no more than the batch has."""
    places = search.problem.places
    nearest = sorted(search.found.items(), key=lambda item: item[1])
    ranked = ((places.tokens_of(text), distance) for text, distance in nearest)
    return guess_texts(search.problem.model, ranked, evidence.num_texts)


def guess_refused(evidence: GradientEvidence, search: EncoderSearch) -> tuple[RecoveredText, ...]:
    """The best refused texts, no two alike, as many as are missing."""
    return guess_texts(search.problem.model, ((tokens, float("inf")) for tokens in _refused(evidence, search)))


def _refused(evidence: GradientEvidence, search: EncoderSearch) -> Iterator[TokenIds]:
    missing = (evidence.num_texts or 0) - len(search.found)
    places = search.problem.places
    shown = [places.tokens_of(text) for text in search.found]
    refused = sorted((cost, text) for text, (cost, _) in search.refused.items() if cost < float("inf"))
    for _, text in refused if not search.is_complete else ():
        tokens = places.tokens_of(text)
        if missing > 0 and not any(_alike(tokens, other) for other in shown):
            shown.append(tokens)
            missing -= 1
            yield tokens


def _alike(left: TokenIds, right: TokenIds) -> bool:
    return sum(a == b for a, b in zip(left, right, strict=False)) > _ALIKE * max(len(left), len(right))
