"""Cases in words: a short name for people, pairs for a table, and the command that runs one again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from unmask.harmless import shown

SEPARATOR = " · "
KEYS = (
    *("secret", "task", "layer", "site", "protocol", "round", "client", "batch_size"),
    *("clients", "defences", "attack", "dtype", "data", "seed"),
)
_SILENT: Mapping[str, tuple[Any, ...]] = {
    "clients": (1,),
    "attack": ("default",),
    "dtype": ("float32",),
    "site": ("stream",),
    "task": ("next_token", "default"),
}


def case_name(case: Mapping[str, Any]) -> str:
    """What is particular about a case, without its channel and model; usual settings are left out."""
    keys = [*(key for key in KEYS if key in case), *(key for key in case if key not in _KNOWN)]
    return SEPARATOR.join(setting(key, case[key]) for key in keys if case[key] not in _SILENT.get(key, ()))


_KNOWN = frozenset({*KEYS, "channel", "model", "source"})


def full_name(case: Mapping[str, Any]) -> str:
    """Channel, model and what is particular."""
    return SEPARATOR.join([shown(case.get("channel", "?")), model_name(case), case_name(case)])


def model_name(case: Mapping[str, Any]) -> str:
    """The model; a secret that was invented for the audit has none."""
    return shown(case.get("model") or "no model", 120)


def setting(key: str, value: Any) -> str:
    """One setting of a case in words."""
    match key:
        case "batch_size":
            return f"{shown(value)} text" + ("" if value == 1 else "s")
        case "defences":
            return defences_name(value)
        case "data" if isinstance(value, Mapping):
            return shown(value.get("name", "?"), 60)
        case "model" | "protocol" | "secret" | "site" | "channel" | "dtype" | "task":
            return shown(value, 120).replace("_", " ") if key == "task" else shown(value, 120)
        case _:
            return f"{shown(key, 40)} {shown(value, 80)}"


def defences_name(defences: Iterable[Any]) -> str:
    """Defences in the order in which they are applied."""
    return " + ".join(shown(defence, 120) for defence in defences) or "no defence"


def specification(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every entry of a case as a pair of texts."""
    return [(shown(key, 60), _written(value)) for key, value in case.items()]


def repeat_command(plan: object | None, folder: str, case_id: str) -> str | None:
    """The command that runs one case again, quoted for a shell; None where no plan made it (a live federation)."""
    if plan is None:
        return None
    return shlex.join(["unmask", "audit", shown(plan), "--out", shown(folder), "--case", shown(case_id)])


def _written(value: Any) -> str:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, Mapping) and set(value) == {"name", "sha256"}:
        return f"{shown(value['name'])} (sha256 {shown(value['sha256'])})"
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return ", ".join(shown(part) for part in value) or "none"
    return shown(json.dumps(value, ensure_ascii=False, sort_keys=True, default=str))
