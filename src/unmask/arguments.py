"""Checks of callers' arguments: each says what was seen, what was expected and what to do."""

from __future__ import annotations

import math
import operator
from enum import Enum
from typing import Any, TypeVar

import torch

from unmask.errors import InputError, UnmaskError
from unmask.wording import did_you_mean

Member = TypeVar("Member", bound=Enum)
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def require_member(kind: type[Member], name: str, value: Any, error: type[UnmaskError] = InputError) -> Member:
    """A member of an enum that a caller gave, or its name."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        hint = did_you_mean(value, [str(member.value) for member in kind])
        raise error(f"{name} must be one of {names}, got {value!r}.{hint}") from None


def require_count(name: str, value: Any, *, least: int = 1, error: type[UnmaskError] = InputError) -> None:
    """Refuse what is neither None nor a whole number of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and (not whole or value < least):
        raise error(f"{name} must be a whole number from {least} on, or None, got {value!r}")


def require_number(name: str, value: Any, *, positive: bool, error: type[UnmaskError] = InputError) -> None:
    """Refuse what is neither None nor a finite number of 0 or more, or above 0."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        bound = "above 0" if positive else "of 0 or more"
        raise error(f"{name} must be a finite number {bound}, or None, got {value!r}")


def require_fingerprint(value: Any, error: type[UnmaskError] = InputError) -> None:
    """Refuse what is no text, the method that gives it above all."""
    if not isinstance(value, str):
        raise error(
            f"model_fingerprint must be the text that model.fingerprint() gives, got {type(value).__name__}; call it, "
            "with ()"
        )


def named_dtype(name: Any) -> torch.dtype:
    """A float type by its name, 'bfloat16', 'torch.bfloat16' or 'bf16'; one that is none already as it is."""
    plain = str(name).removeprefix("torch.")
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, _SHORT_NAMES.get(plain, plain), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"unknown float type {name!r}")
    return dtype


def require_float_type(name: str, value: Any, error: type[UnmaskError] = InputError) -> torch.dtype:
    """A float type that a caller gave, or its name."""
    try:
        return named_dtype(value)
    except ValueError:
        raise error(f"{name} must be a float type of torch or its name, as 'bfloat16', got {value!r}") from None


def require_token_ids(name: str, value: Any, error: type[UnmaskError] = InputError) -> tuple[int, ...]:
    """Token ids that a caller gave as a list, a tuple or an array; a tokenizer's batch of one text is that text."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(listed, (list, tuple)) and len(listed) == 1 and isinstance(listed[0], (list, tuple)):
        listed = listed[0]
    is_listed = isinstance(listed, (list, tuple)) and all(
        hasattr(token, "__index__") and not isinstance(token, bool) and token >= 0 for token in listed
    )
    if not is_listed:
        raise error(f"{name} must be a list of token ids, whole numbers from 0 on, got {value!r}")
    return tuple(operator.index(token) for token in listed)
