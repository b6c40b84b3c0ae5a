"""Parquet columns of lists."""

from __future__ import annotations

import numpy as np
import pytest
from tests.integrations.stores.stores import SECRET, UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store

arrow = pytest.importorskip("pyarrow", reason="comes with the extra 'stores'")
parquet = pytest.importorskip("pyarrow.parquet", reason="comes with the extra 'stores'")


def written(path, **columns):
    parquet.write_table(arrow.table(columns), path, row_group_size=100)
    return path


@pytest.mark.parametrize(
    "kind", [arrow.list_(arrow.float32()), arrow.large_list(arrow.float32()), arrow.list_(arrow.float32(), 32)]
)
def test_lists_of_every_kind_come_back(tmp_path, kind):
    lists = arrow.array(UNITS.tolist(), kind)
    path = written(tmp_path / "v.parquet", text=[SECRET] * 300, emb=lists, id=list(range(300)))
    found = read_store(path, limit=150)
    assert np.array_equal(found.vectors.numpy(), UNITS[:150])
    assert found.ids[:2] == ("0", "1")
    assert SECRET not in repr(found)


def test_half_precision_has_half_steps(tmp_path):
    lists = arrow.array(UNITS.astype(np.float16).tolist(), arrow.list_(arrow.float16()))
    found = read_store(written(tmp_path / "v.parquet", emb=lists))
    assert found.half_steps is not None
    assert (np.abs(found.vectors.numpy() - UNITS) <= found.half_steps.numpy()).all()


def test_columns_are_told_apart(tmp_path):
    wide, narrow = (
        arrow.array(rows.tolist(), arrow.list_(arrow.float32(), rows.shape[1])) for rows in (UNITS, UNITS[:, :8])
    )
    path = written(tmp_path / "v.parquet", wide=wide, narrow=narrow)
    with pytest.raises(EvidenceError, match="2 of the kind 'column'"):
        read_store(path)
    assert read_store(path, model_width=8).vectors.shape == (300, 8)
    assert read_store(path, collection="wide").vectors.shape == (300, 32)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (["a", "b"], "no column with vectors: it holds 'column' of string, expected lists"),
        ([[1.0], [1.0, 2.0]], "2 widths"),
        ([[1.0], None], "1 rows without"),
    ],
)
def test_what_is_no_vector_is_refused(tmp_path, column, said):
    with pytest.raises(EvidenceError, match=said):
        read_store(written(tmp_path / "v.parquet", column=column))


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "v.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(EvidenceError, match="not a whole Parquet file"):
        read_store(tmp_path / "v.parquet")
