"""Cases in words: a short name for people, pairs for a table, and the command that runs one again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from unmask.harmless import make_safe
from unmask.report.folders import is_absolute, last_name, value_without_folders

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
    if is_live(case):
        keys = [key for key in keys if key != "defences"]  # a server does not know what its clients did
    return SEPARATOR.join(setting(key, case[key]) for key in keys if case[key] not in _SILENT.get(key, ()))


_KNOWN = frozenset({*KEYS, "channel", "model", "source"})


def is_live(case: Mapping[str, Any]) -> bool:
    """Whether it comes from a live federation, of which nobody knows the texts or the defences."""
    return case.get("source") == "flower"


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
        case "defences":
            return defences_name(value)
        case "data" if isinstance(value, Mapping):
            return make_safe(value.get("name", "?"), 60)
        case "model":
            return make_safe(value_without_folders(str(value)), 120)
        case "protocol" | "secret" | "site" | "channel" | "dtype" | "task":
            return make_safe(value, 120).replace("_", " ") if key == "task" else make_safe(value, 120)
        case _:
            return f"{make_safe(key, 40)} {make_safe(value, 80)}"


def defences_name(defences: Iterable[Any]) -> str:
    """Defences in the order in which they are applied."""
    return " + ".join(make_safe(defence, 120) for defence in defences or ()) or "no defence"


def specification(case: Mapping[str, Any], show: bool) -> list[tuple[str, str]]:
    """Every entry of a case as a pair of texts. Unless secrets are shown, without folders and the hash of the data."""
    return [(make_safe(key, 60), _write(value, show)) for key, value in case.items()]


def repeat_command(plan: object | None, folder: str, case_id: str, show: bool) -> str | None:
    """The command that runs one case again, quoted for a shell; None where no plan made it (a live federation).

    Unless secrets are shown, an absolute path is its last name: the command works beside it.
    """
    if plan is None:
        return None
    paths = [path if show else last_name(path) for path in (str(plan), folder)]
    plan, folder = (f"./{path}" if path.startswith("-") else path for path in paths)
    return " ".join(_quote(word) for word in ("unmask", "audit", plan, "--out", folder, "--case", case_id))


def is_shortened(plan: object | None, folder: str) -> bool:
    """Whether a redacted command has lost a folder."""
    return plan is not None and any(is_absolute(path) for path in (str(plan), folder))


def _quote(word: str) -> str:
    """A word for bash or zsh, whole and with nothing invisible in it."""
    if word.isprintable():
        return shlex.quote(word)
    signs = (_escape_sign(sign) if not sign.isprintable() or sign in "\\'" else sign for sign in word)
    return f"$'{''.join(signs)}'"


def _escape_sign(sign: str) -> str:
    if sign.isprintable():
        return f"\\{sign}"
    return f"\\x{ord(sign):02x}" if ord(sign) < 0x80 else f"\\U{ord(sign):08x}"


def _write(value: Any, show: bool) -> str:
    if isinstance(value, str):
        return make_safe(value if show else value_without_folders(value))
    if isinstance(value, Mapping) and set(value) == {"name", "sha256"}:
        name = _write(str(value["name"]), show)
        return f"{name} (sha256 {make_safe(value['sha256'])})" if show else name
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return ", ".join(make_safe(part) for part in value) or "none"
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return make_safe(text if show else value_without_folders(text))
