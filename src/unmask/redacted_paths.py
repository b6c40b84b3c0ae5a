"""Paths without their folders, which name users and machines. A redacted report holds no absolute path."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath, PureWindowsPath

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
    """The same for each word of a command."""
    try:
        words = shlex.split(command)
    except ValueError:  # no command of a shell
        return without_folders(command)
    return " ".join(value_without_folders(word) for word in words)
