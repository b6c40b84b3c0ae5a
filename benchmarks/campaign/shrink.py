"""From a recipe that fails to the smallest one found that still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Recipe = TypeVar("Recipe")


def shrink(
    recipe: Recipe,
    simpler: Callable[[Recipe], Iterator[Recipe]],
    fails: Callable[[Recipe], bool],
    seconds: float = 30.0,
) -> Recipe:
    """Take the first simpler recipe that still fails, until none does or the time is over.

    `fails` must be true of the recipe itself. Steps that were refused once are not tried again.
    """
    deadline = time.monotonic() + seconds
    refused: set[str] = set()
    while True:
        for candidate in simpler(recipe):
            if time.monotonic() > deadline:
                return recipe
            if repr(candidate) not in refused and fails(candidate):
                recipe = candidate
                break
            refused.add(repr(candidate))
        else:
            return recipe
