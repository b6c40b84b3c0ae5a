"""Parquet files with a column of lists of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unmask.errors import EvidenceError
from unmask.integrations.stores.stored import StoredVectors, choose_one, need, stored_rows

_ID_COLUMNS = ("id", "_id", "ids", "uuid", "key", "doc_id")


def read_parquet(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """The column of vectors, and one of ids where there is one; other columns are not read."""
    arrow, parquet = need("pyarrow", "Parquet"), need("pyarrow.parquet", "Parquet")
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise EvidenceError(f"{path} is not a whole Parquet file ({error}); copy it again") from None
    schema = file.schema_arrow
    name = choose_column(schema, model_width, collection, path)
    ids = id_column(schema)
    parts, num_read = [], 0
    for part in file.iter_batches(columns=[name, *([ids] if ids else [])]):
        parts.append(part)
        num_read += part.num_rows
        if limit is not None and num_read >= limit:
            break
    table = arrow.Table.from_batches(parts, schema=parts[0].schema if parts else None) if parts else None
    if table is None:
        raise EvidenceError(f"{path} has no rows")
    return read_table(table.slice(0, limit), name, ids, f"column '{name}' of {path.name}")


def choose_column(schema: Any, model_width: int | None, asked: str | None, where: Any) -> str:
    """The column of vectors that was asked for, or the only one."""
    held = [f"'{field.name}' of {field.type}" for field in schema]
    return choose_one(vector_columns(schema, model_width), asked, "column", where, "lists of floats", held)


def vector_columns(schema: Any, model_width: int | None) -> list[str]:
    """Names of columns that are lists of floats; those of the model's width alone where the schema says widths."""
    types = need("pyarrow.types", "Arrow tables")
    lists = [
        field
        for field in schema
        if (types.is_list(field.type) or types.is_large_list(field.type) or types.is_fixed_size_list(field.type))
        and types.is_floating(field.type.value_type)
    ]
    exact = [field.name for field in lists if getattr(field.type, "list_size", None) == model_width]
    return exact if model_width is not None and exact else [field.name for field in lists]


def id_column(schema: Any) -> str | None:
    """The column that names rows, by its name; None where no column has one of the usual ones."""
    return next((name for name in _ID_COLUMNS if name in schema.names), None)


def read_table(table: Any, name: str, ids: str | None, about: str) -> StoredVectors:
    """Rows of a column of lists, which must have one width."""
    column = table.column(name)
    if column.null_count:
        raise EvidenceError(f"{about} has {column.null_count} rows without a vector; leave them out")
    widths = {len(row) for row in column}
    if len(widths) != 1:
        raise EvidenceError(f"{about} has vectors of {len(widths)} widths ({min(widths, default=0)} and more)")
    flat = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    rows = flat.reshape(len(table), widths.pop())
    return stored_rows(rows, table.column(ids).to_pylist() if ids else None, about)
