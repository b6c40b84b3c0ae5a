"""A persistent Chroma folder: embeddings and ids, no documents, and the folder as it was."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from tests.integrations.stores.stores import SECRET, UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store

chromadb = pytest.importorskip("chromadb", reason="comes with the extra 'stores'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("chroma")
    client = chromadb.PersistentClient(str(place), settings=chromadb.Settings(anonymized_telemetry=False))
    for name in ("letters", "notes"):
        collection = client.get_or_create_collection(name, embedding_function=None)
        ids = [f"{name}-{number}" for number in range(len(UNITS))]
        collection.add(ids=ids, embeddings=UNITS.tolist(), documents=[SECRET] * len(UNITS))
    return place


def test_vectors_and_ids_come_back_and_no_documents(folder):
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()}
    found = read_store(folder, collection="notes")
    rows = dict(zip(found.ids, found.vectors.numpy(), strict=True))
    assert all(np.array_equal(rows[f"notes-{number}"], UNITS[number]) for number in range(len(UNITS)))
    assert SECRET not in repr(found)
    assert {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()} == before


def test_a_collection_is_chosen_and_limited(folder):
    assert len(read_store(folder, collection="letters", limit=7).ids) == 7
    with pytest.raises(EvidenceError, match="2 of the kind 'collection': letters, notes"):
        read_store(folder)
    with pytest.raises(EvidenceError, match="has no collection 'mail'; it has: letters, notes"):
        read_store(folder, collection="mail")


def test_a_folder_without_collections_has_nothing_to_choose(tmp_path):
    chromadb.PersistentClient(str(tmp_path), settings=chromadb.Settings(anonymized_telemetry=False))
    with pytest.raises(EvidenceError, match="has no collection with vectors: it holds nothing"):
        read_store(tmp_path)


def test_a_damaged_folder_is_refused(tmp_path):
    (tmp_path / "chroma.sqlite3").write_bytes(b"nothing")
    with pytest.raises(EvidenceError, match="Chroma cannot read"):
        read_store(tmp_path)
