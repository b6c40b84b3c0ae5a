"""Parametrised tests of which some run by default, and all of them with `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sample(names: str, every: Iterable[Any], quick: Sequence[Any]) -> pytest.MarkDecorator:
    """All of them; those that are not `quick` are slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    rows = [(one, marks[one in quick]) for one in every]
    return pytest.mark.parametrize(
        names, [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=mark) for one, mark in rows]
    )
