"""A case in words: the name that the terminal and the report give it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unmask.channels import LIVE_SOURCES
from unmask.safe_text import make_safe, value_without_folders

SEPARATOR = " · "
KEYS = (
    *("secret", "task", "layer", "site", "pooling", "storage", "protocol", "round", "client", "batch_size"),
    *("max_length", "clients", "defences", "attack", "effort", "dtype", "data", "seed"),
)
_SILENT: Mapping[str, tuple[Any, ...]] = {
    "clients": (1,),
    "attack": ("default",),
    "dtype": ("float32",),
    "site": ("stream",),
    "pooling": ("default",),
    "storage": ("float32",),
    "task": ("next_token", "default"),
}


def case_name(case: Mapping[str, Any]) -> str:
    """What is particular about a case, without its channel and model; usual settings are left out."""
    keys = [*(key for key in KEYS if key in case), *(key for key in case if key not in _KNOWN)]
    if is_live(case):
        keys = [key for key in keys if key != "defences"]  # a server does not know what its clients did
    return SEPARATOR.join(setting(key, case[key]) for key in keys if case[key] not in _SILENT.get(key, ()))


_KNOWN = frozenset({*KEYS, "channel", "model", "source"})


def is_live(case: Mapping[str, Any]) -> bool:
    """Whether it comes from a live federation, of which nobody knows the texts or the defences."""
    return case.get("source") in LIVE_SOURCES


def model_and_case(case: Mapping[str, Any]) -> str:
    """Model and what is particular; of a secret without a model the latter alone."""
    model = [model_name(case)] if case.get("model") else []
    return SEPARATOR.join([*model, case_name(case)])


def full_name(case: Mapping[str, Any]) -> str:
    """Channel, model and what is particular."""
    return SEPARATOR.join([make_safe(case.get("channel", "?")), model_name(case), case_name(case)])


def model_name(case: Mapping[str, Any]) -> str:
    """The model, of a path the last part; a secret that was invented for the audit has none."""
    return make_safe(value_without_folders(str(case.get("model") or "no model")), 120)


def setting(key: str, value: Any) -> str:
    """One setting of a case in words."""
    match key:
        case "batch_size":
            return f"{make_safe(value)} text" + ("" if value == 1 else "s")
        case "max_length":
            return f"texts cut to {make_safe(value)} tokens"
        case "clients":
            return f"{make_safe(value)} clients"
        case "defences":
            return defences_name(value)
        case "data" if isinstance(value, Mapping):
            return make_safe(value.get("name", "?"), 60)
        case "model":
            return make_safe(value_without_folders(str(value)), 120)
        case "protocol" | "secret" | "site" | "storage" | "channel" | "dtype" | "task":
            return make_safe(value, 120).replace("_", " ") if key == "task" else make_safe(value, 120)
        case _:
            return f"{make_safe(key, 40)} {make_safe(value, 80)}"


def defences_name(defences: Iterable[Any]) -> str:
    """Defences in the order in which they are applied."""
    return " + ".join(make_safe(defence, 120) for defence in defences or ()) or "no defence"
