"""Texts whose states, or keys and values, are all multiplied by one number: clipped together, or in other units.

    s = a·s(v),    a = median of ⟨s, s(v)⟩/‖s(v)‖² over rows that agree with their nearest token but for their length

Directions tell the tokens without a (nearest.py); with it the texts are read again, and every token is proven as if
nothing had been multiplied. It is one number, and each state has tens or hundreds that must agree.

Notation: s a row that was seen, s(v) that of the nearest token.
Limits: one factor of all rows; noise that hides every row hides the factor too.
Cost: where nothing was proven, a second reading.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from unmask.attacks.outputs.prompts.reader import PromptReader
from unmask.attacks.outputs.prompts.seen_text import ReadText
from unmask.attacks.outputs.prompts.side_by_side import Reading, read_side_by_side

_ONE = 1e-4  # nearer to 1 it hides nothing


def read_texts(reader: PromptReader, readings: Callable[[PromptReader], Iterable[Reading[ReadText]]]) -> list[ReadText]:
    """Read all texts; where nothing of them is proven, once more without the factor that they have in common."""
    texts = read_side_by_side(readings(reader))
    factor = None if _proves(texts) else find_factor(texts)
    if factor is None:
        return texts
    again = read_side_by_side(readings(replace(reader, factor=factor)))
    return again if _proves(again) else texts


def find_factor(texts: Sequence[ReadText]) -> float | None:
    """The number that all rows are multiplied by; None where no row tells, or where it is 1."""
    factors = [factor for text in texts if text.nearest is not None for factor in text.nearest.factors]
    factor = statistics.median(factors) if factors else 1.0
    return factor if factor > 0 and abs(factor - 1) > _ONE else None


def _proves(texts: Sequence[ReadText]) -> bool:
    return any(token.proven for text in texts for token in text.tokens)
