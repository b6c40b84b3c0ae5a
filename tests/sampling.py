"""Parametrised tests of which some run by default, and all of them with `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(first: Iterable[Any], second: Iterable[Any], times: int = 1) -> list[tuple[Any, Any]]:
    """Some pairs in which every value of either list occurs, those of the longer list `times` times."""
    rows, columns = list(first), list(second)
    if len(rows) < len(columns):
        return [(row, column) for column, row in in_turn(columns, rows, times)]
    return [(row, columns[(place + turn) % len(columns)]) for place, row in enumerate(rows) for turn in range(times)]


def sample(names: str, every: Iterable[Any], quick: Sequence[Any]) -> pytest.MarkDecorator:
    """All of them; those that are not `quick` are slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    rows = [(one, marks[one in quick]) for one in every]
    return pytest.mark.parametrize(
        names, [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=mark) for one, mark in rows]
    )
