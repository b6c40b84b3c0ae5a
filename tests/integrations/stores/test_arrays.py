"""Plain arrays, and that nothing pickled is opened."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.integrations.stores.stores import UNITS

from unmask.errors import EvidenceError
from unmask.integrations.stores import read_store
from unmask.linalg.product_codes import product_codes


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_array_comes_back(tmp_path, dtype):
    np.save(tmp_path / "v.npy", UNITS.astype(dtype))
    found = read_store(tmp_path / "v.npy", limit=9)
    assert np.array_equal(found.vectors.numpy(), UNITS.astype(dtype)[:9].astype(np.float32))
    assert (found.half_steps is not None) == (dtype is np.float16)
    assert found.about == "NumPy: v.npy"


def test_one_vector_is_a_row(tmp_path):
    np.save(tmp_path / "v.npy", UNITS[0])
    assert read_store(tmp_path / "v.npy").vectors.shape == (1, 32)


def test_an_archive_says_what_it_has(tmp_path):
    np.savez(tmp_path / "v.npz", a=UNITS, b=UNITS[:, :8], labels=np.arange(300))
    with pytest.raises(EvidenceError, match="2 of the kind 'array': a, b"):
        read_store(tmp_path / "v.npz")
    assert read_store(tmp_path / "v.npz", model_width=8).vectors.shape == (300, 8)
    assert read_store(tmp_path / "v.npz", collection="a").vectors.shape == (300, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_come_back(tmp_path, dtype):
    rows = torch.from_numpy(UNITS).to(dtype)
    save_file({"embeddings": rows, "mask": torch.ones(3)}, tmp_path / "v.safetensors")
    found = read_store(tmp_path / "v.safetensors")
    assert torch.equal(found.vectors, rows.float())
    assert (found.half_steps is not None) == (dtype is torch.bfloat16)


def test_pickled_objects_are_not_opened(tmp_path):
    objects = np.array([UNITS[0], None], dtype=object)
    np.save(tmp_path / "v.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "v.npz", a=objects)
    for name in ("v.npy", "v.npz"):
        with pytest.raises(EvidenceError, match="holds pickled objects"):
            read_store(tmp_path / name)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", np.longdouble])
def test_floats_of_other_machines_and_longer_ones_are_read(tmp_path, dtype):
    np.save(tmp_path / "v.npy", UNITS.astype(dtype))
    found = read_store(tmp_path / "v.npy")
    assert np.array_equal(found.vectors.numpy(), UNITS.astype(dtype).astype(np.float32))
    assert (found.half_steps is not None) == (dtype == ">f2")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, "it holds nothing, expected a matrix of floats"),
        ({"a": np.arange(3)}, r"it holds 'a' of int64 \(3,\), expected a matrix of floats"),
        ({str(number): np.float32(1) for number in range(8)}, "and 2 more, expected"),
    ],
)
@pytest.mark.parametrize("asked", [None, "a"])
def test_an_archive_without_vectors_says_what_it_has(tmp_path, arrays, said, asked):
    np.savez(tmp_path / "v.npz", **arrays)
    with pytest.raises(EvidenceError, match=rf"v\.npz has no array with vectors: .*{said}"):
        read_store(tmp_path / "v.npz", asked)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([["a", "b"]]), "holds <U1, expected floats: text is no embedding"),
        (np.array([[b"a", b"b"]]), "holds .S1, expected floats: text is no embedding"),
        (UNITS.astype(np.complex64), "holds complex64, expected floats: .*save array.real"),
        (UNITS > 0, r"holds bool, expected floats: .*numpy\.packbits"),
        (np.zeros((2, 3), dtype=[("id", "i4"), ("v", "f4")]), r"it has the fields id, v; save the one .*array\['id'\]"),
        (np.zeros((2, 3), dtype="V2"), "bytes whose type NumPy does not know; if they were bfloat16"),
        (np.zeros((2, 3), dtype="M8[s]"), "give the array of the embeddings"),
        (np.ones((2, 3), dtype=np.uint16), "codes whose scale it does not say"),
    ],
)
def test_each_kind_that_is_no_float_has_its_own_advice(tmp_path, array, said):
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(EvidenceError, match=said):
        read_store(tmp_path / "v.npy")


def test_signs_are_read_once_they_are_packed_as_advised(tmp_path):
    np.save(tmp_path / "v.npy", np.packbits(UNITS > 0, axis=1))
    assert np.array_equal(read_store(tmp_path / "v.npy", model_width=32).vectors.numpy() > 0, UNITS > 0)


@pytest.mark.parametrize("array", [np.float32(3), np.ones((3, 4), dtype=np.int8), np.ones((2, 3, 4)), np.ones((0, 4))])
def test_what_is_no_matrix_of_floats_is_refused(tmp_path, array):
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(EvidenceError, match=r"v\.npy (holds int8|has the shape)"):
        read_store(tmp_path / "v.npy")


def test_damaged_files_are_refused(tmp_path):
    np.save(tmp_path / "v.npy", UNITS)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "v.npy").read_bytes()[:300])
    (tmp_path / "cut.npz").write_bytes(b"PK and nothing")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{nothing")
    for name in ("cut.npy", "cut.npz", "cut.safetensors"):
        with pytest.raises(EvidenceError, match="is not a whole"):
            read_store(tmp_path / name)


@pytest.mark.parametrize("kind", ["ubinary", "binary"])
def test_packed_signs_are_those_of_sentence_transformers(tmp_path, kind):
    library = pytest.importorskip("sentence_transformers.quantization", reason="comes with the dev extra")
    np.save(tmp_path / "v.npy", library.quantize_embeddings(UNITS, kind))
    found = read_store(tmp_path / "v.npy", model_width=32)
    assert np.array_equal(found.vectors.numpy() > 0, UNITS > 0)
    assert torch.allclose(found.vectors.norm(dim=1), torch.ones(300))
    assert torch.equal(product_codes(torch.from_numpy(UNITS), found.quantiser), torch.from_numpy(UNITS > 0).long())
    with pytest.raises(EvidenceError, match="codes whose scale it does not say"):
        read_store(tmp_path / "v.npy", model_width=33)
