"""The table of stores: how each is recognised by what lies there, and the function that reads it.

A store often keeps the documents beside their vectors. They are the secret: no reader asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unmask.arguments import require_count
from unmask.errors import EvidenceError
from unmask.evidence.foreign_files import is_pickle, pickle_error
from unmask.integrations.stores.arrays import read_npy, read_npz, read_safetensors
from unmask.integrations.stores.chroma import read_chroma
from unmask.integrations.stores.faiss_index import is_index, read_faiss
from unmask.integrations.stores.json_store import is_json_store, read_json_store
from unmask.integrations.stores.lance import read_lance
from unmask.integrations.stores.parquet import read_parquet
from unmask.integrations.stores.pgvector_dump import ARCHIVE, read_dump
from unmask.integrations.stores.qdrant import read_qdrant
from unmask.integrations.stores.stored import StoredVectors

Reader = Callable[[Path, str | None, int | None, int | None], StoredVectors]


@dataclass(frozen=True)
class Store:
    """A line of the table; `fits` sees a path and, of a file, its first bytes."""

    looks: str
    fits: Callable[[Path, bytes], bool]
    read: Reader


STORES: Mapping[str, Store] = {
    "Chroma": Store("a folder with chroma.sqlite3", lambda path, _: (path / "chroma.sqlite3").is_file(), read_chroma),
    "Qdrant": Store(
        "a folder of its local mode: meta.json and collection/",
        lambda path, _: (path / "meta.json").is_file() and (path / "collection").is_dir(),
        read_qdrant,
    ),
    "LanceDB": Store(
        "a folder with *.lance folders, or one of them",
        lambda path, _: path.is_dir() and (path.suffix == ".lance" or any(path.glob("*.lance"))),
        read_lance,
    ),
    "FAISS": Store(
        "a file of faiss.write_index, or a folder with index.faiss",
        is_index,
        read_faiss,
    ),
    "NumPy": Store("a .npy file", lambda _, start: start.startswith(b"\x93NUMPY"), read_npy),
    "NumPy archive": Store("a .npz file", lambda path, start: start[:2] == b"PK" and path.suffix == ".npz", read_npz),
    "Parquet": Store("a .parquet file", lambda _, start: start.startswith(b"PAR1"), read_parquet),
    "safetensors": Store("a .safetensors file", lambda path, start: start[8:9] == b"{", read_safetensors),
    "JSON": Store(
        "a .json file of LangChain's InMemoryVectorStore or LlamaIndex's SimpleVectorStore",
        is_json_store,
        read_json_store,
    ),
    "pgvector": Store(
        "a plain dump of a table (pg_dump, .sql)",
        lambda path, start: path.is_file() and (path.suffix == ".sql" or start.startswith(ARCHIVE)),
        read_dump,
    ),
}


def read_store(
    path: str | Path, collection: str | None = None, limit: int | None = None, model_width: int | None = None
) -> StoredVectors:
    """Vectors of a store of any kind that the table knows.

    `collection` is the name of a collection, table, column or array where there are several, `limit` how many vectors
    are read, `model_width` the width that they should have, which decides between columns.
    """
    path = Path(path)
    require_count("limit", limit, error=EvidenceError)
    if not path.exists():
        raise EvidenceError(f"there is no file or folder {path}; give the place where a vector database keeps its data")
    start = b""
    if path.is_file():
        with open(path, "rb") as file:
            start = file.read(16)
    name = next((name for name, store in STORES.items() if store.fits(path, start)), None)
    if name is None and path.is_file() and is_pickle(path):
        raise pickle_error(path)
    if name is None:
        raise EvidenceError(
            f"{path} is no store that is known: {_seen(path, start)}; known are "
            + "; ".join(f"{kind} ({store.looks})" for kind, store in STORES.items())
        )
    found = STORES[name].read(path, collection, limit, model_width)
    return replace(found, about=f"{name}: {found.about}")


def _seen(path: Path, start: bytes) -> str:
    if path.is_dir():
        held = ", ".join(sorted(child.name for child in path.iterdir())[:8])
        return f"the folder holds {held or 'nothing'}"
    return f"the file begins with {start[:8]!r}" if start else "the file is empty"
