"""How stores are recognised, and what is said where none is."""

from __future__ import annotations

import numpy as np
import pytest

from unmask.errors import EvidenceError
from unmask.integrations.stores import STORES, read_store


def test_what_is_not_known_is_described(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"\x00\x01\x02\x03")
    (tmp_path / "words.txt").write_text("Words.")
    with pytest.raises(EvidenceError, match=r"the folder holds weights\.bin, words\.txt; known are Chroma"):
        read_store(tmp_path)
    with pytest.raises(EvidenceError, match=r"the file begins with b'Words\.'"):
        read_store(tmp_path / "words.txt")
    (tmp_path / "index.txt").write_text("Index of words.")
    with pytest.raises(EvidenceError, match=r"the file begins with b'Index of'"):
        read_store(tmp_path / "index.txt")
    (tmp_path / "none.faiss").touch()
    with pytest.raises(EvidenceError, match="the file is empty; known are"):
        read_store(tmp_path / "none.faiss")
    with pytest.raises(EvidenceError, match="there is no file or folder"):
        read_store(tmp_path / "nothing")


def test_a_limit_is_a_count(tmp_path):
    np.save(tmp_path / "v.npy", np.ones((3, 4)))
    with pytest.raises(EvidenceError, match="limit must be a whole number from 1 on"):
        read_store(tmp_path / "v.npy", limit=0)


def test_every_store_says_how_it_looks():
    assert all(store.looks for store in STORES.values())
    assert len(STORES) == 10
