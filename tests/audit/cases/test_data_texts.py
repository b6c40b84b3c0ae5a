"""Texts from files."""

from __future__ import annotations

import pytest

from unmask.audit.cases.data import read_pairs, read_texts
from unmask.errors import InputError


def test_one_text_a_line(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("one\n\n  \ntwo\tb\nthree", encoding="utf-8")
    assert read_texts(path, None) == ["one", "two\tb", "three"]
    assert read_texts(path, 2) == ["one", "two\tb"]


def test_the_first_column_of_a_table(tmp_path):
    path = tmp_path / "texts.tsv"
    path.write_text("one\tx\ntwo\ty\n", encoding="utf-8")
    assert read_texts(path, None) == ["one", "two"]
    assert read_pairs(path, 1) == [("one", "x")]


def test_pairs(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("a\tb\tc\n\nd\te\n", encoding="utf-8")
    assert read_pairs(path, None) == [("a", "b\tc"), ("d", "e")]
    path.write_text("a\tb\nlonely\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"pair 2 of .* has no tab"):
        read_pairs(path, None)


@pytest.mark.parametrize("read", [read_texts, read_pairs])
def test_files_that_hold_none(tmp_path, read):
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "none.txt", None)
    with pytest.raises(InputError, match="is a folder"):
        read(tmp_path, None)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(InputError, match="holds no"):
        read(tmp_path / "empty.txt", None)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="UTF-8"):
        read(tmp_path / "latin.txt", None)
