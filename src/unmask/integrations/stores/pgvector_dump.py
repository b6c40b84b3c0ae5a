"""pgvector: a plain dump of a table, as backups keep it. No server is asked.

    COPY public.items (id, content, embedding) FROM stdin;
    1<tab>…<tab>[0.1,-0.25,…]
    \\.

pgvector prints the shortest decimals that give back its float32 numbers. Columns whose values are '[numbers]' are
vectors; of the others only an id is looked at. A halfvec column (float16) is printed the same way; its few digits show
in the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unmask.errors import EvidenceError
from unmask.integrations.stores.stored import StoredVectors, choose_one, stored_rows

_COPY = re.compile(r"^COPY (?P<table>\S+) \((?P<columns>[^)]*)\) FROM stdin;\s*$")
_VECTOR = re.compile(r"^\[[-+0-9.eE,]+\]$")


def read_dump(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """The column of vectors of a table; `collection` is 'table', or 'table/column' where there are several."""
    found: dict[str, list[int]] = {}
    for table, columns, row in _rows(path):
        if table not in found:
            found[table] = [place for place in range(len(columns)) if _VECTOR.match(row[place])]
    asked, _, column = (collection or "").partition("/")
    tables = [table for table, places in found.items() if places]
    if not tables:
        raise EvidenceError(f"{path} has no COPY block with a column of vectors '[…]'; dump the table as plain text")
    name = choose_one(tables, asked or None, "table", path)
    ids: list[str] = []
    vectors: list[np.ndarray] = []
    chosen = ""
    for table, columns, row in _rows(path):
        if table != name or len(vectors) == (limit or -1):
            continue
        chosen = chosen or choose_one([columns[place] for place in found[name]], column or None, "column", name)
        text = row[columns.index(chosen)]
        if text != r"\N":
            ids.append(row[columns.index("id")] if "id" in columns else str(len(ids)))
            vectors.append(np.array(text[1:-1].split(","), dtype=np.float32))
    if len({len(vector) for vector in vectors}) != 1:
        raise EvidenceError(f"the column '{chosen}' of {name} has vectors of several widths, or of none")
    return stored_rows(np.stack(vectors), ids, f"column '{chosen}' of the table {name}")


def _rows(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Table, names of columns and values of every row of every COPY block."""
    block = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if block is None:
                block = _COPY.match(line)
                columns = [name.strip().strip('"') for name in block["columns"].split(",")] if block else []
            elif line.startswith("\\."):
                block = None
            else:
                row = line.rstrip("\n").split("\t")
                if len(row) == len(columns):
                    yield block["table"], columns, row
