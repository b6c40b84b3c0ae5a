"""LanceDB: a folder of *.lance tables. The vectors themselves lie in a table, whatever index is built over them."""

from __future__ import annotations

from pathlib import Path

from unmask.errors import EvidenceError
from unmask.integrations.stores.parquet import choose_column, id_column, read_table
from unmask.integrations.stores.stored import StoredVectors, choose_one, need


def read_lance(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """The column of vectors of a table; `collection` is 'table', or 'table/column' where there are several."""
    lancedb = need("lancedb", "LanceDB")
    folder, only = (path.parent, path.stem) if path.suffix == ".lance" else (path, None)
    tables = [only] if only else sorted(child.stem for child in folder.glob("*.lance"))
    asked, _, column = (collection or "").partition("/")
    name = choose_one(tables, asked or None, "table", path, "a folder *.lance")
    try:
        table = lancedb.connect(str(folder)).open_table(name)
        schema = table.schema
        vectors = choose_column(schema, model_width, column or None, f"{path}, table '{name}'")
        ids = id_column(schema)
        query = table.search().select([vectors, *([ids] if ids else [])])
        rows = query.limit(limit if limit is not None else table.count_rows()).to_arrow()
    except (OSError, ValueError, RuntimeError) as error:
        raise EvidenceError(
            f"LanceDB cannot read the table '{name}' of {folder} ({error}); copy the folder again"
        ) from None
    if not len(rows):
        raise EvidenceError(f"the table '{name}' of {folder} has no rows")
    return read_table(rows, vectors, ids, f"column '{vectors}' of the table '{name}'")
