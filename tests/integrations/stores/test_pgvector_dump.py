"""Dumps of PostgreSQL tables with pgvector's columns, written as pg_dump writes them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.integrations.stores.stores import SECRET, UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store

HEADER = "-- PostgreSQL database dump\n\nSET client_encoding = 'UTF8';\n\n"


def block(table, columns, rows):
    lines = "".join("\t".join(row) + "\n" for row in rows)
    return f"COPY public.{table} ({', '.join(columns)}) FROM stdin;\n{lines}\\.\n\n"


def vector(row):
    """As pgvector prints it: the shortest decimals that give the float32 back."""
    return "[" + ",".join(np.format_float_positional(number, trim="-") for number in row) + "]"


def written(path):
    notes = [[str(100 + number), SECRET, vector(row)] for number, row in enumerate(UNITS[:20])]
    notes.append(["999", SECRET, r"\N"])
    people = [["1", "Ann"]]
    path.write_text(
        HEADER + block("people", ["id", "name"], people) + block("notes", ["id", "content", "embedding"], notes)
    )
    return path


def test_vectors_and_ids_come_back_and_no_content(tmp_path):
    found = read_store(written(tmp_path / "dump.sql"))
    assert np.array_equal(found.vectors.numpy(), UNITS[:20])
    assert found.ids[:2] == ("100", "101")
    assert SECRET not in repr(found)
    assert len(read_store(tmp_path / "dump.sql", limit=3).ids) == 3


def test_tables_are_chosen(tmp_path):
    path = written(tmp_path / "dump.sql")
    path.write_text(path.read_text() + block("mail", ["embedding"], [[vector(UNITS[0])]]))
    with pytest.raises(EvidenceError, match=r"2 of the kind 'table': public\.mail, public\.notes"):
        read_store(path)
    assert read_store(path, "public.mail").vectors.shape == (1, 32)


def test_a_dump_without_vectors_is_refused(tmp_path):
    (tmp_path / "dump.sql").write_text(HEADER + block("people", ["id", "name"], [["1", "Ann"]]))
    with pytest.raises(EvidenceError, match="no COPY block with a column of vectors"):
        read_store(tmp_path / "dump.sql")
