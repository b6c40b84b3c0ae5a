"""The paper's data sets as files: one `sentence<TAB>label` a line, looked for in ../shared/data beside the checkout."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
Example = TypeVar("Example")
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


def draw_batch(examples: Sequence[Example], set_name: str, num_texts: int, batch: int, seed: int) -> list[Example]:
    """The same sentences for every model and task, none of them twice in a batch."""
    if len(examples) < num_texts:
        raise SystemExit(f"{set_name} has {len(examples)} usable sentences, a batch of {num_texts} needs more")
    generator = np.random.default_rng([seed, zlib.crc32(set_name.encode()), num_texts, batch])
    return [examples[index] for index in generator.choice(len(examples), size=num_texts, replace=False)]
