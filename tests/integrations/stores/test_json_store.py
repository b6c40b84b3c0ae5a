"""One JSON file, as LangChain and LlamaIndex write it: vectors and ids, no texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.integrations.stores.stores import SECRET, UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store

IDS = [f"note-{number}" for number in range(len(UNITS))]


def check(path, kind):
    found = read_store(path)
    assert found.ids == tuple(IDS)
    np.testing.assert_allclose(found.vectors.numpy(), UNITS, atol=1e-7)
    assert SECRET not in repr(found)
    assert found.about.startswith(f"JSON: {kind}")
    assert len(read_store(path, limit=3).ids) == 3


def test_langchains_own_dump(tmp_path):
    core = pytest.importorskip("langchain_core.vectorstores", reason="LangChain is missing: pip install langchain-core")
    embeddings = pytest.importorskip("langchain_core.embeddings")

    class Given(embeddings.Embeddings):
        def embed_documents(self, texts):
            return UNITS.tolist()

        def embed_query(self, text):
            return UNITS[0].tolist()

    store = core.InMemoryVectorStore(Given())
    store.add_texts([SECRET] * len(UNITS), ids=IDS)
    store.dump(str(tmp_path / "store.json"))
    check(tmp_path / "store.json", "store.json")


def test_llamaindexs_own_file(tmp_path):
    simple = pytest.importorskip(
        "llama_index.core.vector_stores.simple", reason="LlamaIndex is missing: pip install llama-index-core"
    )
    schema = pytest.importorskip("llama_index.core.schema")
    store = simple.SimpleVectorStore()
    nodes = [
        schema.TextNode(id_=name, text=SECRET, embedding=row.tolist()) for name, row in zip(IDS, UNITS, strict=True)
    ]
    store.add(nodes)
    store.persist(str(tmp_path / "default__vector_store.json"))
    check(tmp_path / "default__vector_store.json", "default__vector_store.json")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"a": {"text": "x"}}, "has no vectors: it holds 'a', expected what LangChain's"),
        ({"embedding_dict": {}}, "has no vectors"),
        ({"embedding_dict": {"a": [1.0], "b": [1.0, 2.0]}}, "vectors of 2 lengths"),
        ({"embedding_dict": {"a": ["x"]}}, "no numbers"),
    ],
)
def test_other_files_are_refused(tmp_path, document, message):
    path = tmp_path / "store.json"
    path.write_text(json.dumps(document))
    with pytest.raises(EvidenceError, match=message):
        read_store(path)


def test_a_torn_file_is_refused(tmp_path):
    (tmp_path / "store.json").write_text('{"a": ')
    with pytest.raises(EvidenceError, match="no whole JSON file"):
        read_store(tmp_path / "store.json")
