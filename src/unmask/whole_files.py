"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unmask.errors import EvidenceError


def require_place(path: Path) -> None:
    """Refuse what no file can be written to."""
    if not path.parent.is_dir():
        raise EvidenceError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise EvidenceError(f"cannot write {path}: it is a folder; give the name of a file in it")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, for its owner alone; synced and renamed at the end, removed if that fails."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
