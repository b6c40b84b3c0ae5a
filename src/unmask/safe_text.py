"""Hostile text made harmless: nothing invisible, nothing endless, nothing that Markdown would interpret."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath, PureWindowsPath

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


def quote_word(value: object) -> str:
    """A word of a command that is shown, for bash or zsh: whole, and with nothing invisible in it."""
    word = str(value)
    if word.isprintable():
        return shlex.quote(word)
    signs = (_escape_sign(sign) if not sign.isprintable() or sign in "\\'" else sign for sign in word)
    return f"$'{''.join(signs)}'"


def _escape_sign(sign: str) -> str:
    if sign.isprintable():
        return f"\\{sign}"
    return f"\\x{ord(sign):02x}" if ord(sign) < 0x80 else f"\\U{ord(sign):08x}"


CUT = "…/"
_PATH = re.compile(r"""(?<![\w./\\~…-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'"]+[/\\])+([^\s/\\'"]*)""")


def is_absolute(path: str) -> bool:
    """Whether a path starts at the root, at a drive or at somebody's home."""
    starts_at_home = path.startswith("~") and "/" in path
    return PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute() or starts_at_home


def last_name(path: str) -> str:
    """The last part of an absolute path; a relative one as it is."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] if is_absolute(path) else path


def without_folders(text: str) -> str:
    """Prose in which absolute paths are cut to their last names."""
    return _PATH.sub(rf"{CUT}\1", text)


def value_without_folders(value: str) -> str:
    """The same for a value that may be a path as a whole, spaces included."""
    return f"{CUT}{last_name(value)}" if is_absolute(value) else without_folders(value)


def command_without_folders(command: str) -> str:
    """The same for each word of a command; those with spaces are quoted."""
    try:
        words = shlex.split(command)
    except ValueError:  # no command of a shell
        return without_folders(command)
    cut = (value_without_folders(word) for word in words)
    return " ".join(shlex.quote(word) if re.search(r"""[\s'"]""", word) else word for word in cut)
