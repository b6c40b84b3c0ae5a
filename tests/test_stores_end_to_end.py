"""Real stores that are filled with MiniLM's vectors, quantised, read back, and attacked.

A candidate is certain if its vector, computed again, is the stored one up to half steps, or has the stored one's code.
Two questions are asked here without a search: does the true text pass that test, and does any other sentence?
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import unmask
from unmask.attacks.table import ATTACKS
from unmask.evidence import VectorEvidence, load_evidence
from unmask.integrations.stores import read_store
from unmask.models.pooling import recipe_of
from unmask.protocols import observe_vectors

SENTENCES = [
    "Transfer it today, please.",
    "The patient was discharged on Friday.",
    "Ann leaves the company.",
    "We lost the contract.",
    "She never answered.",
]
OTHERS = ["Transfer it today please.", "The patient was discharged on Monday.", "Anna leaves the company.", "We won."]
FLOAT32 = 3e-6  # forward passes of other batches differ by so much in a number


@pytest.fixture(scope="module")
def vectors(minilm) -> np.ndarray:
    return observe_vectors(minilm, SENTENCES).vectors.numpy()


@pytest.fixture(scope="module")
def training(minilm) -> np.ndarray:
    """What a quantiser of a larger store was trained on, the stored texts among it."""
    topics = ("garden", "train", "meeting", "river", "lamp", "recipe", "engine", "letter")
    actions = ("was quiet", "is late again", "ends at noon", "costs too much", "was found by a child", "needs repair")
    lines = [f"The {topic} {action}." for topic in topics for action in actions]
    return observe_vectors(minilm, SENTENCES + lines).vectors.numpy()


def write_faiss(path: Path, kind: str, vectors: np.ndarray, training: np.ndarray) -> Path:
    faiss = pytest.importorskip("faiss", reason="comes with the extra 'stores'")
    faiss.omp_set_num_threads(1)
    index = faiss.index_factory(384, kind)
    if hasattr(index, "do_polysemous_training"):
        index.do_polysemous_training = False  # orders centroids for another use, and takes seconds
    index.train(training)
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def write_chroma(path: Path, vectors: np.ndarray) -> Path:
    chromadb = pytest.importorskip("chromadb", reason="comes with the extra 'stores'")
    client = chromadb.PersistentClient(str(path), settings=chromadb.Settings(anonymized_telemetry=False))
    collection = client.create_collection("notes", embedding_function=None)
    ids = [f"note-{number}" for number in range(len(vectors))]
    collection.add(ids=ids, embeddings=vectors.tolist(), documents=SENTENCES)
    return path


def write_qdrant(path: Path, vectors: np.ndarray) -> Path:
    qdrant = pytest.importorskip("qdrant_client", reason="comes with the extra 'stores'")
    client = qdrant.QdrantClient(path=str(path))
    config = qdrant.models.VectorParams(size=384, distance=qdrant.models.Distance.COSINE)
    client.create_collection("notes", vectors_config=config)
    points = [
        qdrant.models.PointStruct(id=number, vector=vector.tolist(), payload={"text": SENTENCES[number]})
        for number, vector in enumerate(vectors)
    ]
    client.upsert("notes", points)
    client.close()
    return path


def make_store(kind: str, folder: Path, vectors: np.ndarray, training: np.ndarray) -> Path:
    if kind == "Chroma":
        return write_chroma(folder / "chroma", vectors)
    if kind == "Qdrant":
        return write_qdrant(folder / "qdrant", vectors)
    return write_faiss(folder / "v.faiss", kind, vectors, training)


def agrees(evidence: VectorEvidence, text: int, candidates: torch.Tensor) -> list[bool]:
    """Whether each candidate's vector may be the stored one."""
    if evidence.quantiser is not None:
        return evidence.same_code(text, candidates).tolist()
    allowed = FLOAT32 if evidence.half_steps is None else evidence.half_steps[text] + FLOAT32
    return ((candidates - evidence.vectors[text]).abs() <= allowed).all(1).tolist()


@pytest.mark.parametrize(
    "kind", ["Flat", "SQ8", "SQ4", "SQfp16", "IVF2,SQ8", "PQ96x4", "IVF2,PQ96x4", "Chroma", "Qdrant"]
)
def test_true_texts_agree_with_what_is_stored_and_others_do_not(minilm, vectors, training, tmp_path, kind):
    stored = read_store(make_store(kind, tmp_path, vectors, training), model_width=384)
    evidence = load_evidence(stored.evidence(minilm).save(tmp_path / "vectors.safetensors"))
    evidence.check(minilm)
    assert evidence.recipe == recipe_of(minilm)
    order = [int(name.rpartition("-")[2]) for name in stored.ids]
    true, others = (observe_vectors(minilm, texts).vectors for texts in (SENTENCES, OTHERS))
    for place, number in enumerate(order):
        assert agrees(evidence, place, true) == [other == number for other in range(len(SENTENCES))]
        assert not any(agrees(evidence, place, others))
    assert not any(sentence in repr(stored) for sentence in SENTENCES)


def test_few_codes_do_not_tell_every_text_apart(minilm, vectors, training, tmp_path):
    """The same code is no proof by itself: of 128 bits a comma may be left out."""
    stored = read_store(write_faiss(tmp_path / "v.faiss", "IVF2,PQ32x4", vectors, training))
    nearly = observe_vectors(minilm, OTHERS[:1]).vectors
    assert agrees(stored.evidence(minilm), 0, nearly) == [True]


@pytest.mark.slow
@pytest.mark.skipif("embedding" not in ATTACKS, reason="there is no attack on embeddings yet")
@pytest.mark.parametrize("kind", ["Flat", "SQ8", "PQ96x8", "Chroma", "Qdrant"])
def test_stores_give_their_texts_away(minilm, vectors, training, tmp_path, kind):
    stored = read_store(make_store(kind, tmp_path, vectors, np.repeat(training, 6, 0)), model_width=384)
    evidence = stored.evidence(minilm)
    for place, name in enumerate(stored.ids[:3]):
        recovery = unmask.recover_text(evidence.select([place]), minilm)
        true = minilm.encode(SENTENCES[int(name.rpartition("-")[2])])
        found = [(list(text.tokens), text.certain) for text in recovery.value.texts]
        assert not any(is_certain and tokens not in (true, true[1:-1]) for tokens, is_certain in found)
        if kind != "PQ96x8":
            assert any(tokens in (true, true[1:-1]) for tokens, _ in found)
