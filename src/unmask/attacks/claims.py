"""What an attack says of texts where it found none: nothing, or guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from unmask.attacks.run import Run
from unmask.models.adapter import Model
from unmask.proof.conclusions import conclude_nothing
from unmask.recovery import RecoveredText, RecoveredTexts, Recovery, Search, Status


def claim_nothing(
    run: Run, status: Status, reason: str, used: Sequence[str] = (), searches: tuple[Search, ...] = ()
) -> Recovery[RecoveredTexts]:
    """Nothing can be claimed; `searches` are those that ran."""
    return conclude_nothing(run.cost(), status, reason, used, searches)


def guess_texts(
    model: Model, ranked: Iterable[tuple[tuple[int, ...], float]], most: int | None = None
) -> tuple[RecoveredText, ...]:
    """Texts that nothing confirms, with their distances, and no more than the batch has."""
    return tuple(
        RecoveredText(tokens, model.decode(tokens), certain=False, residual=distance)
        for tokens, distance in islice(ranked, most)
    )
