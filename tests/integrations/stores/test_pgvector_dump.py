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
    with pytest.raises(
        EvidenceError, match=r"column of vectors .*it has the tables public\.people, none.*pg_dump --data"
    ):
        read_store(tmp_path / "dump.sql")
    (tmp_path / "dump.sql").write_text("SELECT 1;\n")
    with pytest.raises(EvidenceError, match="it has no rows of tables; dump the table"):
        read_store(tmp_path / "dump.sql")


def test_a_table_whose_first_vector_is_missing_is_read(tmp_path):
    rows = [["1", r"\N"], ["2", vector(UNITS[0])]]
    (tmp_path / "dump.sql").write_text(HEADER + block("notes", ["id", "embedding"], rows))
    assert read_store(tmp_path / "dump.sql").ids == ("2",)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["[1,,2]"], r"row 1 \(id 1\) of the column 'embedding' of public.notes is '\[1,,2\]', expected numbers"),
        (["[1,2]", "[1,2"], r"row 2 \(id 2\) .* is '\[1,2', expected numbers"),
        (["[1,2]", SECRET], f"is a text of {len(SECRET)} characters, expected numbers"),
        (["[1,2]", "[1,2,3]"], "has vectors of 2 and 3 numbers, expected one width"),
    ],
)
def test_damaged_vectors_are_refused_by_their_row(tmp_path, cells, said):
    rows = [[str(number), cell] for number, cell in enumerate(cells, start=1)]
    (tmp_path / "dump.sql").write_text(HEADER + block("notes", ["id", "embedding"], rows))
    with pytest.raises(EvidenceError, match=said) as raised:
        read_store(tmp_path / "dump.sql")
    assert SECRET not in str(raised.value)


# INSERT statements, as pg_dump writes them with --column-inserts, --inserts and --rows-per-insert

TEXT = "it''s (a), 'b';\nINSERT INTO public.notes VALUES".replace(" 'b'", " ''b''")


def test_statements_with_names_of_columns(tmp_path):
    lines = [
        f"INSERT INTO public.notes (id, content, embedding) VALUES ({number}, '{TEXT}', '{vector(row)}');\n"
        for number, row in enumerate(UNITS[:5])
    ]
    lines.append("INSERT INTO public.notes (id, content, embedding) VALUES (9, '', NULL);\n")
    (tmp_path / "dump.sql").write_text("".join(lines))
    found = read_store(tmp_path / "dump.sql")
    assert np.array_equal(found.vectors.numpy(), UNITS[:5])
    assert found.ids == ("0", "1", "2", "3", "4")
    assert len(read_store(tmp_path / "dump.sql", limit=2).ids) == 2


def test_statements_without_names_and_of_many_rows(tmp_path):
    rows = ",\n".join(
        f"\t({number}, '{TEXT}', '{vector(row)}'::public.vector(32))" for number, row in enumerate(UNITS[:5])
    )
    people = "INSERT INTO public.people OVERRIDING SYSTEM VALUE VALUES (1, 'Ann');\n"
    statement = f"INSERT INTO public.notes VALUES\n{rows}\nON CONFLICT DO NOTHING;\n"
    (tmp_path / "dump.sql").write_text(HEADER + people + statement)
    for name in (None, "public.notes", "public.notes/3"):
        assert np.array_equal(read_store(tmp_path / "dump.sql", name).vectors.numpy(), UNITS[:5])
    (tmp_path / "cut.sql").write_text((HEADER + people + statement)[:-400])  # inside of a vector
    assert len(read_store(tmp_path / "cut.sql").ids) == 4


def test_an_archive_is_refused(tmp_path):
    (tmp_path / "dump").write_bytes(b"PGDMP\x01\x0e")
    with pytest.raises(EvidenceError, match="is an archive of pg_dump, and plain dumps are read; make one: pg_restore"):
        read_store(tmp_path / "dump")
