"""The paper's data sets as files: one `sentence<TAB>label` a line, looked for in ../shared/data beside the checkout."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SETS = {"cola": "CoLA", "sst2": "SST-2", "rotten_tomatoes": "Rotten Tomatoes"}


def read_set(path: Path) -> list[tuple[str, int]]:
    """Sentences with their labels."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        sentence, _, label = line.rstrip("\r").rpartition("\t")
        if not sentence or not label.isdecimal():
            raise SystemExit(f"{path}, line {number}: expected 'sentence<TAB>label', got {line[:60]!r}")
        pairs.append((sentence, int(label)))
    return pairs


def sha256_of(path: Path) -> str:
    """What makes two files the same."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
