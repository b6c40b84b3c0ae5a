"""Settings as text, for the command line and for plans: a name and, after a colon, key=value with commas between."""

from __future__ import annotations

from collections.abc import Callable

from unmask.errors import InputError


def read_spec(what: str, text: str, usage_of: Callable[[str], str]) -> tuple[str, dict[str, str]]:
    """Name and settings of a text; `usage_of` a name says how it is used, or raises where there is no such name.

    `what` the text names ('defence', 'protocol') is for messages.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    usage = usage_of(name)
    settings: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(f"{what} '{name}': expected key=value, got '{part}'; {usage}")
        if key in settings:
            raise InputError(f"{what} '{name}': '{key}' is given twice, again in '{part.strip()}'; {usage}")
        settings[key] = value
    return name, settings
