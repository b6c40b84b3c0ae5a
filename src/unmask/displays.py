"""How results and evidence look in a shell and in a notebook: a few lines that fit a screen.

Recovered text is hostile: what is invisible is shown as an escape, what is endless is cut, and HTML is escaped.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from unmask.safe_text import make_safe

MOST_ROWS = 12
LONGEST_LINE = 100
Row = tuple[str, str]  # what it is, and what it says


class Displayed:
    """A result that is shown as a headline with rows below it; subclasses say which."""

    def display_rows(self) -> tuple[Row, Sequence[Row]]:
        """The headline, and all rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        headline, rows = self.display_rows()
        return _as_text(headline, _cut(rows))

    def _repr_html_(self) -> str:
        (title, said), rows = self.display_rows()
        cells = "".join(
            f"<tr><th style='text-align:left'>{_escape(name)}</th><td style='text-align:left'>{_escape(text)}</td></tr>"
            for name, text in _cut(rows)
        )
        return f"<div><b>{_escape(title)}</b> {_escape(said)}<table>{cells}</table></div>"

    def show(self) -> None:
        """Print all of it, however many rows there are."""
        headline, rows = self.display_rows()
        sys.stdout.write(_as_text(headline, rows) + "\n")


class DisplayedFields:
    """A dataclass of tensors that is shown by their types and shapes."""

    def __repr__(self) -> str:
        return describe_fields(self)


def describe_fields(thing: Any) -> str:
    """Type(name=…): tensors by type and shape, tables of tensors by number, and no field that has its default."""
    told = []
    for each in fields(thing):
        value = getattr(thing, each.name)
        is_default = value is each.default or (each.default_factory is not MISSING and value == each.default_factory())
        if each.repr and not is_default:
            told.append(f"{each.name}={_describe(value)}")
    return f"{type(thing).__name__}({', '.join(told)})"


def _describe(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{len(value)} tensors" if value else "{}"
    return make_safe(repr(value), LONGEST_LINE)


def _cut(rows: Sequence[Row]) -> Sequence[Row]:
    """As many rows as a screen has room for, the last ones always."""
    if len(rows) <= MOST_ROWS:
        return rows
    kept = MOST_ROWS - 3
    return [*rows[:kept], ("…", f"{len(rows) - kept - 2} more; .show() prints all"), *rows[-2:]]


def _as_text(headline: Row, rows: Sequence[Row]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{headline[0]}: {make_safe(headline[1])}"]
    return "\n".join([*lines, *(f"  {name:<{width}}  {make_safe(text, LONGEST_LINE)}" for name, text in rows)])


def _escape(text: str) -> str:
    return html.escape(make_safe(text))
