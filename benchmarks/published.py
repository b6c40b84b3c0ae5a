"""Numbers that the papers print, as facts to stand beside ours: ROUGE-1 and ROUGE-2 × 100, means over 100 batches.

`dager_tables.tsv` holds Tables 1, 2, 3 and 6 of DAGER (arXiv 2405.15586): DAGER, TAG and LAMP on GPT-2, BERT and
Llama-2-7B, with pretrained weights. None of the texts is part of it.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parent / "dager_tables.tsv"
Rouge = tuple[float, float]


@cache
def published(method: str = "DAGER") -> dict[tuple[str, str, int], Rouge]:
    """(model, set, texts) → (ROUGE-1, ROUGE-2) of a method; tables that repeat a cell agree in it."""
    with TABLES.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream, delimiter="\t") if row["method"] == method]
    return {(row["model"], row["data"], int(row["B"])): (float(row["rouge1"]), float(row["rouge2"])) for row in rows}
