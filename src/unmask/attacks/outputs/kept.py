"""What is measured of a model once, and kept while the model lives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from unmask.models.adapter import Model

_KEPT: WeakKeyDictionary[Model, dict[Hashable, Any]] = WeakKeyDictionary()
Value = TypeVar("Value")


def once(model: Model, key: Hashable, make: Callable[[], Value]) -> Value:
    """The value of a key, made when it is first asked for; `make` must not hold on to more than it needs."""
    kept = _KEPT.setdefault(model, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]
