"""Results as JSON lines, one a batch, on the disk as soon as known: a run that was killed goes on with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def open_results(path: Path | None, resume: bool) -> dict[str, Result]:
    """What the file holds, by key; a line that a killed run left unfinished is cut off."""
    if path is None:
        return {}
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.read_bytes() if resume and path.is_file() else b""
    whole = held[: held.rfind(b"\n") + 1]
    if not path.is_file() or path.stat().st_size != len(whole):
        path.write_bytes(whole)
    results = (json.loads(line) for line in whole.splitlines())
    return {result["key"]: result for result in results}


def append(path: Path | None, result: Result) -> None:
    """One line, on the disk before the next batch starts."""
    if path is None:
        return
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(result, allow_nan=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
