"""FAISS indexes of many kinds: vectors, numbers, half steps and centroids come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.integrations.stores.stores import UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store
from unmask.integrations.stores.faiss_index import is_index
from unmask.linalg.product_codes import decode_codes, product_codes

faiss = pytest.importorskip("faiss", reason="comes with the extra 'stores'")


def written(factory: str, path, ids=None):
    faiss.omp_set_num_threads(1)
    index = faiss.index_factory(UNITS.shape[1], factory)
    if hasattr(index, "do_polysemous_training"):
        index.do_polysemous_training = False  # orders centroids for another use, and takes seconds
    index.train(UNITS)
    if ids is None:
        index.add(UNITS)
    else:
        index.add_with_ids(UNITS, ids)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW16", "PQ4x4,RFlat", "RR32,Flat"])
def test_exact_indexes_give_vectors(tmp_path, factory):
    found = read_store(written(factory, tmp_path / "v.index"))
    assert np.allclose(found.vectors.numpy(), UNITS, atol=1e-6)
    assert found.ids[:3] == ("0", "1", "2")
    assert found.half_steps is None
    assert found.about.startswith("FAISS: Index")


@pytest.mark.parametrize(
    "factory",
    ["SQ8", "SQ6", "SQ4", "SQfp16", "SQbf16", "IVF4,SQ8", "IVF4,SQfp16", "HNSW16_SQ8", "IDMap,SQ8"],
)
def test_scalar_quantisers_tell_half_steps(tmp_path, factory):
    ids = np.arange(300) if factory.startswith("IDMap") else None
    found = read_store(written(factory, tmp_path / "v.index", ids))
    assert found.half_steps is not None
    off = (found.vectors - torch.from_numpy(UNITS)).abs()
    assert (off <= found.half_steps).all()
    assert float((off / found.half_steps).max()) > 0.9


@pytest.mark.parametrize("factory", ["PQ8x4", "IVF4,PQ8x4"])
def test_product_quantisers_give_their_centroids(tmp_path, factory):
    found = read_store(written(factory, tmp_path / "v.index"))
    units = torch.from_numpy(UNITS)
    assert found.quantiser is not None
    assert (found.offsets is not None) == factory.startswith("IVF")
    offsets = 0 if found.offsets is None else found.offsets
    codes = product_codes(units - offsets, found.quantiser)
    assert torch.allclose(decode_codes(codes, found.quantiser) + offsets, found.vectors, atol=1e-6)
    # The store knows the loss of the codes from the lengths alone.
    true = float((found.vectors - units).square().sum(1).mean().sqrt())
    assert found.error == pytest.approx(true, rel=0.1)


def test_rotations_are_undone_and_projections_are_lossy(tmp_path):
    rotated = read_store(written("OPQ4_32,PQ4x4", tmp_path / "rotated.index"))
    assert rotated.quantiser is None
    assert float((rotated.vectors - torch.from_numpy(UNITS)).norm(dim=1).mean()) == pytest.approx(
        rotated.error, rel=0.15
    )
    projected = read_store(written("PCA16,Flat", tmp_path / "projected.index"))
    assert projected.error > 0.3


@pytest.mark.parametrize("factory", ["IDMap,Flat", "IDMap2,Flat", "IVF4,Flat"])
def test_numbers_of_vectors_come_back(tmp_path, factory):
    ids = np.random.default_rng(1).permutation(300) + 10**12
    found = read_store(written(factory, tmp_path / "v.index", ids), limit=40)
    row = {int(number): place for place, number in enumerate(ids)}
    assert len(found.ids) == 40
    assert np.allclose(found.vectors.numpy(), UNITS[[row[int(number)] for number in found.ids]], atol=1e-6)


def test_a_folder_of_langchain_is_read_without_its_pickle(tmp_path):
    written("Flat", tmp_path / "index.faiss")
    (tmp_path / "index.pkl").write_bytes(b"\x80\x04cos\nsystem\n.")
    assert read_store(tmp_path).vectors.shape == (300, 32)


@pytest.mark.parametrize("factory", ["LSH", "RQ2x4", "L2norm,Flat"])
def test_other_kinds_are_refused_by_name(tmp_path, factory):
    with pytest.raises(EvidenceError, match=r"this FAISS index (is an Index|has a Normal)"):
        read_store(written(factory, tmp_path / "v.index"))


def test_a_binary_index_gives_signs(tmp_path):
    index = faiss.IndexBinaryFlat(32)
    index.add(np.packbits(UNITS > 0, axis=1))
    faiss.write_index_binary(index, str(tmp_path / "v.index"))
    found = read_store(tmp_path / "v.index", limit=50)
    assert np.array_equal(found.vectors.numpy() > 0, UNITS[:50] > 0)
    assert torch.equal(product_codes(torch.from_numpy(UNITS[:50]), found.quantiser), (found.vectors > 0).long())
    hashed = faiss.IndexBinaryHNSW(32, 4)
    hashed.add(np.packbits(UNITS > 0, axis=1))
    faiss.write_index_binary(hashed, str(tmp_path / "hashed.index"))
    with pytest.raises(EvidenceError, match="this FAISS index is an IndexBinaryHNSW"):
        read_store(tmp_path / "hashed.index")


def test_indexes_are_told_from_texts():
    exact = ["Flat", "IDMap,Flat", "IDMap2,Flat", "HNSW16", "NSG16", "IVF4,Flat", "IVF4,FlatDedup", "PCA8,Flat"]
    coded = [
        "LSH",
        "PQ4x4",
        "RQ2x4",
        "LSQ2x4",
        "SQ8",
        "PQ4x4fs",
        "IVF4,SQ8",
        "IVF4,PQ4x4",
        "IVF4,PQ4x4fs",
        "IVF4,RQ2x4",
    ]
    for factory in [*exact, *coded, "IVF4,PQ4+4", "HNSW16_SQ8", "HNSW16_PQ4", "PQ4x4,RFlat", "ZnLattice4x2_4"]:
        index = faiss.index_factory(32, factory)
        assert is_index(Path("v.index"), faiss.serialize_index(index)[:16].tobytes()), factory
    assert is_index(Path("v.index"), faiss.serialize_index_binary(faiss.IndexBinaryHNSW(32, 4))[:16].tobytes())
    for words in (b"INSERT INTO", b"Inventory", b"IDs and more", b"IN 2024", b"INSERT", b"IxF2", b""):
        assert not is_index(Path("v.index"), words)


def test_damaged_and_empty_indexes_are_refused(tmp_path):
    whole = written("Flat", tmp_path / "v.index").read_bytes()
    (tmp_path / "cut.index").write_bytes(whole[:200])
    with pytest.raises(EvidenceError, match=r"FAISS \S+ cannot read .*cut or damaged, or a newer FAISS.*copy it again"):
        read_store(tmp_path / "cut.index")
    (tmp_path / "new.faiss").write_bytes(b"Inew" + whole[4:])
    with pytest.raises(EvidenceError, match=r"FAISS \S+ cannot read .*upgrade faiss-cpu"):
        read_store(tmp_path / "new.faiss")
    faiss.write_index(faiss.IndexFlatL2(8), str(tmp_path / "empty.index"))
    with pytest.raises(EvidenceError, match="holds no vectors"):
        read_store(tmp_path / "empty.index")
