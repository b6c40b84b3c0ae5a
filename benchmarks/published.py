"""Numbers that DAGER's paper (arXiv 2405.15586) prints, as facts to stand beside ours; none of the texts is part of it.

Tables have the numbers of its first version; 1, 2, 3, 5 and 6 are 2, 3, 5, 7 and 8 in that of NeurIPS 2024.
`dager_tables.tsv`: Tables 1, 2, 3 and 6, ROUGE-1 and ROUGE-2 × 100, means over 100 batches, pretrained weights.
`dager_hours.tsv`: Table 5, hours for 100 batches of DAGER, TAG and LAMP.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parent / "dager_tables.tsv"
HOURS = Path(__file__).parent / "dager_hours.tsv"
Rouge = tuple[float, float]


@dataclass(frozen=True)
class PublishedCell:
    """A number of a table: which model, set, method and batch size; ROUGE-1 and ROUGE-2 × 100."""

    table: int
    model: str
    data: str
    method: str
    texts: int
    rouge: Rouge


@cache
def published_cells() -> tuple[PublishedCell, ...]:
    """Every row of the tables, in their order; tables that repeat a cell repeat it here."""
    return tuple(
        PublishedCell(
            int(row["table"]),
            row["model"],
            row["data"],
            row["method"],
            int(row["B"]),
            (float(row["rouge1"]), float(row["rouge2"])),
        )
        for row in _rows(TABLES)
    )


@cache
def published(method: str = "DAGER") -> dict[tuple[str, str, int], Rouge]:
    """(model, set, texts) → (ROUGE-1, ROUGE-2) of a method; tables that repeat a cell agree in it."""
    return {(cell.model, cell.data, cell.texts): cell.rouge for cell in published_cells() if cell.method == method}


@cache
def published_hours() -> dict[tuple[str, str, str, int], float]:
    """(model, set, method, texts) → hours for 100 batches."""
    return {(row["model"], row["data"], row["method"], int(row["B"])): _hours(row) for row in _rows(HOURS)}


def _hours(row: dict[str, str]) -> float:
    return float(row["hours_for_100_batches"])


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream, delimiter="\t")
