"""Chroma: a persistent folder. A copy of it is opened, as Chroma itself changes the folder that it opens."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

from unmask.errors import EvidenceError
from unmask.integrations.stores.stored import StoredVectors, choose_one, need, stored_rows


def read_chroma(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """The embeddings of a collection; documents and metadata are not asked for."""
    chromadb = need("chromadb", "a Chroma folder")
    with tempfile.TemporaryDirectory(prefix="unmask-") as copy:
        folder = Path(copy, "chroma")
        shutil.copytree(path, folder)
        settings = chromadb.Settings(anonymized_telemetry=False, is_persistent=True, persist_directory=str(folder))
        try:
            client = chromadb.PersistentClient(str(folder), settings=settings)
            try:
                names = [found.name for found in client.list_collections()]
                name = choose_one(names, collection, "collection", path, "one with embeddings")
                held = client.get_collection(name, embedding_function=None).get(limit=limit, include=["embeddings"])
            finally:
                getattr(client, "close", lambda: None)()  # older versions have none
        except EvidenceError:
            raise
        except Exception as error:  # Chroma's errors share no class
            raise EvidenceError(
                f"Chroma cannot read {path} ({error}); copy the whole folder again, while no server writes to it"
            ) from None
        vectors = np.array(held["embeddings"], dtype=np.float32)
    if not len(vectors):
        raise EvidenceError(f"the collection '{name}' of {path} has no embeddings; choose another (--collection NAME)")
    return stored_rows(vectors, held["ids"], f"collection '{name}'")
