"""Wordings that many messages share: things that are counted, and the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_CLOSE = 0.5  # of the letters agree; 'next' is close to 'next-token', and 'lion' to neither 'sgd' nor 'adamw'


def count_noun(number: int, noun: str, plural: str | None = None) -> str:
    """'1 case', '2 cases'."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A sentence to append, with a space before it, that names the closest known name; empty where none is close."""
    close = get_close_matches(str(name).lower(), list(known), n=1, cutoff=_CLOSE)
    return f" Did you mean '{close[0]}'?" if close else ""
