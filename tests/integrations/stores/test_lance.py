"""LanceDB folders: the column of vectors of a table, and ids; no other column."""

from __future__ import annotations

import numpy as np
import pytest
from tests.integrations.stores.stores import SECRET, UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store

lancedb = pytest.importorskip("lancedb", reason="comes with the extra 'stores'")


@pytest.fixture
def folder(tmp_path):
    rows = [{"id": f"n{number}", "vector": row.tolist(), "text": SECRET} for number, row in enumerate(UNITS)]
    lancedb.connect(str(tmp_path)).create_table("notes", data=rows)
    return tmp_path


def test_vectors_and_ids_come_back_and_no_text(folder):
    for path in (folder, folder / "notes.lance"):
        found = read_store(path)
        assert np.array_equal(found.vectors.numpy(), UNITS)
        assert found.ids[:2] == ("n0", "n1")
        assert SECRET not in repr(found)
    assert len(read_store(folder, limit=5).ids) == 5


def test_tables_and_columns_are_chosen(folder):
    rows = [{"a": row.tolist(), "b": (-row).tolist()} for row in UNITS[:5]]
    lancedb.connect(str(folder)).create_table("pairs", data=rows)
    with pytest.raises(EvidenceError, match="2 of the kind 'table': notes, pairs"):
        read_store(folder)
    with pytest.raises(EvidenceError, match="2 of the kind 'column': a, b"):
        read_store(folder, "pairs")
    found = read_store(folder, "pairs/b")
    assert np.array_equal(found.vectors.numpy(), -UNITS[:5])
    assert found.ids == ("0", "1", "2", "3", "4")


def test_a_damaged_table_is_refused(tmp_path):
    (tmp_path / "notes.lance").mkdir()
    with pytest.raises(EvidenceError, match="LanceDB cannot read"):
        read_store(tmp_path)
