"""What is measured of a model once, and kept for the next call with the same weights.

Copies of a model are the same model: an attack on a bfloat16 client works on a copy of its own at every call.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from unmask.models.adapter import Model
from unmask.models.fingerprint import fingerprint_of

_KEPT: OrderedDict[Hashable, dict[Hashable, Any]] = OrderedDict()
_MOST_MODELS = 4  # those used last; a layer of SmolLM2 takes some 120 MB
Value = TypeVar("Value")


def compute_once(model: Model, key: Hashable, make: Callable[[], Value]) -> Value:
    """The value of a key, made when it is first asked for; `make` must not hold on to more than it needs."""
    identity = identity_of(model)
    kept = _KEPT.setdefault(identity, {})
    _KEPT.move_to_end(identity)
    while len(_KEPT) > _MOST_MODELS:
        _KEPT.popitem(last=False)
    if key not in kept:
        kept[key] = make()
    return kept[key]


def identity_of(model: Model) -> Hashable:
    """Equal for the same weights, in one precision, on one device, with the same head.

    A sample of each tensor, to the last digit, and every row of the token embedding: which of them are equal is kept.
    """
    digits = fingerprint_of(model.family, model.named_parameters(), rounded_to=None)
    embedding = model.parameter(model.token_embedding).detach()
    direction = torch.linspace(1.0, 2.0, embedding.shape[1], dtype=embedding.dtype, device=embedding.device)
    rows = (embedding @ direction).contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return digits, hashlib.sha256(rows).hexdigest(), type(model.hf).__name__, model.dtype, str(model.device)
