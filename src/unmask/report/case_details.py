"""A case in the report: its settings as pairs for a table, and the command that runs it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unmask.safe_text import is_absolute, last_name, make_safe, quote_word, value_without_folders


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
    return " ".join(quote_word(word) for word in ("unmask", "audit", plan, "--out", folder, "--case", case_id))


def is_shortened(plan: object | None, folder: str) -> bool:
    """Whether a redacted command has lost a folder."""
    return plan is not None and any(is_absolute(path) for path in (str(plan), folder))


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
