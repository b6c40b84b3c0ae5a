"""pgvector: a plain dump of a table, as backups keep it. No server is asked.

    COPY public.items (id, content, embedding) FROM stdin;
    1<tab>…<tab>[0.1,-0.25,…]
    \\.

    INSERT INTO public.items VALUES (1, '…', '[0.1,-0.25,…]');

pgvector prints the shortest decimals that give back its float32 numbers. Columns whose values are '[numbers]' are
vectors; of the others only an id is looked at. A halfvec column (float16) is printed the same way; its few digits show
in the values.

Limits: INSERT statements are read as pg_dump writes them (--inserts, --column-inserts, --rows-per-insert), each
beginning a line; without the names of columns these are called 1, 2, …. Archives (pg_dump -Fc) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unmask.errors import EvidenceError
from unmask.integrations.stores.stored import StoredVectors, choose_one, stored_rows

ARCHIVE = b"PGDMP"  # what an archive of pg_dump begins with
_NULL = r"\N"
_COPY = re.compile(r"^COPY (?P<table>\S+) \((?P<columns>[^)]*)\) FROM stdin;\s*$")
_INSERT = re.compile(
    r"^INSERT INTO (?P<table>[^\s(]+)\s*(?:\((?P<columns>[^)]*)\)\s*)?(?:OVERRIDING \w+ VALUE\s+)?VALUES"
)
_TOKEN = re.compile(r"'[^']*(?:''[^']*)*'|[(),]|[^'(),\s]+")
_VECTOR = re.compile(r"^\[[-+0-9.eE, ]+\]$")
_DIGITS = re.compile(r"^[-+0-9.eE, \[\]]{0,40}$")
_Row = tuple[str, list[str], list[str]]


def read_dump(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """The column of vectors of a table; `collection` is 'table', or 'table/column' where there are several."""
    with open(path, "rb") as file:
        if file.read(len(ARCHIVE)) == ARCHIVE:
            raise EvidenceError(
                f"{path} is an archive of pg_dump, and plain dumps are read; make one: pg_restore -f plain.sql ARCHIVE"
            )
    found: dict[str, list[int]] = {}
    for table, columns, row in _rows(path):
        if not found.get(table):
            found[table] = [place for place in range(len(columns)) if _VECTOR.match(row[place])]
    asked, _, column = (collection or "").partition("/")
    tables = [table for table, places in found.items() if places]
    if not tables:
        seen = f"the tables {', '.join(found)}, none with such a column" if found else "no rows of tables"
        raise EvidenceError(
            f"{path} has no COPY block and no INSERT statement with a column of vectors '[…]': it has {seen}; dump the "
            "table as plain text: pg_dump --data-only --table=TABLE DATABASE > dump.sql"
        )
    name = choose_one(tables, asked or None, "table", path)
    ids: list[str] = []
    vectors: list[np.ndarray] = []
    chosen = ""
    for table, columns, row in _rows(path):
        if table != name or len(vectors) == (limit or -1):
            continue
        chosen = chosen or choose_one([columns[place] for place in found[name]], column or None, "column", name)
        text = row[columns.index(chosen)]
        if text != _NULL:
            ids.append(row[columns.index("id")] if "id" in columns else str(len(ids)))
            vectors.append(_numbers(text, f"row {len(ids)} (id {ids[-1]}) of the column '{chosen}' of {name}"))
    widths = sorted({len(vector) for vector in vectors})
    if len(widths) != 1:
        raise EvidenceError(
            f"the column '{chosen}' of {name} has vectors of {' and '.join(map(str, widths))} numbers, expected one "
            "width; dump the rows of one model alone"
        )
    return stored_rows(np.stack(vectors), ids, f"column '{chosen}' of the table {name}")


def _numbers(text: str, where: str) -> np.ndarray:
    """The numbers of '[1,2]'."""
    try:
        if not _VECTOR.match(text):
            raise ValueError
        return np.array(text[1:-1].split(","), dtype=np.float32)
    except ValueError:
        shown = repr(text) if _DIGITS.match(text) else f"a text of {len(text)} characters"  # which may be a document
        raise EvidenceError(
            f"{where} is {shown}, expected numbers with a comma between, '[0.1,-0.25]'; the dump was changed or "
            "damaged: dump the table again, or leave this row out"
        ) from None


def _rows(path: Path) -> Iterator[_Row]:
    """Table, names of columns and values of every row of every COPY block and INSERT statement."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if block := _COPY.match(line):
                yield from _copied(block["table"], _names(block["columns"]), file)
            elif start := _INSERT.match(line):
                yield from _inserted(start, line, file)


def _copied(table: str, columns: list[str], lines: Iterator[str]) -> Iterator[_Row]:
    """Rows up to the end of a COPY block."""
    for line in lines:
        if line.startswith("\\."):
            return
        row = line.rstrip("\n").split("\t")
        if len(row) == len(columns):
            yield table, columns, row


def _inserted(start: re.Match[str], line: str, lines: Iterator[str]) -> Iterator[_Row]:
    """Rows of an INSERT statement; it ends with the first line that ends with ';' outside of a text."""
    parts, num_quotes = [line[start.end() :]], line.count("'")
    while num_quotes % 2 or not parts[-1].rstrip().endswith(";"):
        line = next(lines, ";")
        parts.append(line)
        num_quotes += line.count("'") if line != ";" else num_quotes % 2  # the file ends within a text
    columns = _names(start["columns"]) if start["columns"] else []
    for row in _values("".join(parts)):
        names = columns or [str(number) for number in range(1, len(row) + 1)]
        if len(row) == len(names):
            yield start["table"], names, row


def _values(text: str) -> Iterator[list[str]]:
    """The values of '(1, ''text'', NULL), (…)', a list for each outer pair of brackets; casts are left out."""
    row: list[str] = []
    value, depth = "", 0
    for token in _TOKEN.findall(text):
        depth += (token == "(") - (token == ")")
        if depth == 1 and token == "(":
            row, value = [], ""
        elif (depth == 1 and token == ",") or (depth == 0 and token == ")"):
            row.append(
                _NULL if value.upper() == "NULL" else value[1:-1].replace("''", "'") if value[:1] == "'" else value
            )
            value = ""
            if depth == 0:
                yield row
        elif value[:1] != "'":
            value += token


def _names(columns: str) -> list[str]:
    return [name.strip().strip('"') for name in columns.split(",")]
