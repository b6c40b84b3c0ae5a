"""Hostile text made harmless: nothing invisible, nothing endless, nothing that Markdown would interpret."""

from __future__ import annotations

LONGEST = 400  # characters of one value that are shown; findings.jsonl has all of it


def make_safe(value: object, longest: int = LONGEST) -> str:
    """A value as text with control, bidi and invisible characters as visible escapes, cut where it is endless.

    What comes out holds no character that XML refuses, no line end and no lone surrogate. Markup is left as it is:
    HTML, XML and JSON have writers that escape it.
    """
    text = str(value)
    if len(text) <= longest and text.isprintable():
        return text
    safe = "".join(_escape(character) for character in text[:longest])
    return safe if len(text) <= longest else f"{safe} … ({len(text)} characters)"


def code_span(value: object, longest: int = LONGEST) -> str:
    """A value as a Markdown code span, in which nothing is markup, a link or a mention, also inside a table."""
    text = make_safe(value, longest).replace("`", "\\x60").replace("|", "\\x7c")
    return f"`{text}`" if text.strip() else "–"


def _escape(character: str) -> str:
    """Categories C (control, format, surrogate, unassigned) and Z (separators) are not printable, but a space is."""
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
