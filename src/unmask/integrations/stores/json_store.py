"""Stores that are one JSON file: LangChain's `InMemoryVectorStore.dump` and LlamaIndex's `SimpleVectorStore.persist`.

    LangChain:   {id: {"id": …, "vector": [x₁, …, x_k], "text": …, "metadata": …}, …}
    LlamaIndex:  {"embedding_dict": {id: [x₁, …, x_k], …}, "metadata_dict": …, …}

Neither library is needed. Texts and metadata of the file are not looked at.

Limits: numbers are read as float32, the type of nearly all embeddings.
Cost: the file in memory.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from unmask.errors import EvidenceError
from unmask.integrations.stores.stored import StoredVectors, stored_rows


def is_json_store(path: Path, start: bytes) -> bool:
    """A .json file that begins with an object."""
    return path.suffix == ".json" and start.lstrip()[:1] == b"{"


def read_json_store(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """The vectors of the file, by the ids that it gives them."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} is no whole JSON file ({error}); copy it again") from None
    found = _vectors(document) if isinstance(document, dict) else {}
    if not found:
        raise EvidenceError(
            f"{path} has no vectors: it holds {_seen(document)}, expected what LangChain's InMemoryVectorStore.dump or "
            "LlamaIndex's SimpleVectorStore.persist writes; give that file"
        )
    kept = dict(islice(found.items(), limit))
    widths = {len(vector) for vector in kept.values()}
    if len(widths) != 1:
        raise EvidenceError(f"{path} has vectors of {len(widths)} lengths ({sorted(widths)}), expected one model's")
    try:
        rows = np.array(list(kept.values()), dtype=np.float64).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise EvidenceError(f"{path} has vectors that are no numbers ({error})") from None
    return stored_rows(rows, list(kept), path.name, model_width)


def _vectors(document: dict[str, Any]) -> dict[str, list[Any]]:
    """Vectors by id, in either form."""
    if isinstance(listed := document.get("embedding_dict"), dict):
        return {name: vector for name, vector in listed.items() if isinstance(vector, list) and vector}
    records = {name: record.get("vector") for name, record in document.items() if isinstance(record, dict)}
    return {name: vector for name, vector in records.items() if isinstance(vector, list) and vector}


def _seen(document: Any) -> str:
    if not isinstance(document, dict):
        return f"a {type(document).__name__}"
    return ", ".join(map(repr, list(document)[:4])) or "nothing"
