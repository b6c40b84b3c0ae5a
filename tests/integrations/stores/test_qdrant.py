"""Qdrant's local folder: vectors are read out of its pickles without loading them."""

from __future__ import annotations

import base64
import pickle
import sqlite3

import numpy as np
import pytest
from tests.integrations.stores.stores import SECRET, UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store
from unmask.integrations.stores.qdrant import vectors_in

qdrant = pytest.importorskip("qdrant_client", reason="comes with the extra 'stores'")


def filled(place, vectors, config):
    client = qdrant.QdrantClient(path=str(place))
    client.create_collection("notes", vectors_config=config)
    points = [
        qdrant.models.PointStruct(id=number, vector=vector, payload={"text": SECRET, "vector": [1.0]})
        for number, vector in enumerate(vectors)
    ]
    client.upsert("notes", points)
    client.close()
    return place


def params(width):
    return qdrant.models.VectorParams(size=width, distance=qdrant.models.Distance.COSINE)


def test_vectors_and_ids_come_back_and_no_payload(tmp_path):
    found = read_store(filled(tmp_path, UNITS[:20].tolist(), params(32)))
    assert np.array_equal(found.vectors.numpy(), UNITS[:20])
    assert found.ids == tuple(map(str, range(20)))
    assert SECRET not in repr(found)
    assert len(read_store(tmp_path, limit=3).ids) == 3


def test_long_vectors_are_whole(tmp_path):
    """Pickles write lists in pieces of 1,000."""
    long = np.random.default_rng(0).standard_normal((3, 2000)).astype(np.float32)
    assert np.array_equal(read_store(filled(tmp_path, long.tolist(), params(2000))).vectors.numpy(), long)


def test_named_vectors_are_chosen_by_name(tmp_path):
    both = [{"body": row.tolist(), "title": (-row).tolist()} for row in UNITS[:5]]
    filled(tmp_path, both, {"body": params(32), "title": params(32)})
    assert np.array_equal(read_store(tmp_path, "notes/title").vectors.numpy(), -UNITS[:5])
    with pytest.raises(EvidenceError, match="2 of the kind 'vector': body, title"):
        read_store(tmp_path)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_never_loaded(tmp_path):
    """A point that runs code when it is loaded."""
    filled(tmp_path, UNITS[:1].tolist(), params(32))
    point = pickle.dumps({"id": 0, "vector": [0.5] * 32, "payload": Evil()})
    with sqlite3.connect(tmp_path / "collection/notes/storage.sqlite") as database:
        name = base64.b64encode(pickle.dumps(1)).decode()
        database.execute("INSERT INTO points VALUES (?, ?)", (name, point))
    found = read_store(tmp_path)
    assert found.ids == ("0", "1")
    assert np.allclose(found.vectors[1].numpy(), 0.5)


@pytest.mark.parametrize(
    "point", [{"id": 0, "payload": {}}, {"vector": None}, {"vector": [[1.0, 2.0]]}, {"vector": "words"}]
)
def test_points_of_another_kind_are_refused(point):
    with pytest.raises(ValueError, match="vector"):
        vectors_in(pickle.dumps(point))


def test_damaged_folders_and_servers_are_refused(tmp_path):
    (tmp_path / "collection").mkdir()
    (tmp_path / "meta.json").write_text('{"collections": {"notes": {}}}')
    with pytest.raises(EvidenceError, match="only the local mode"):
        read_store(tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(EvidenceError, match="damaged"):
        read_store(tmp_path)
