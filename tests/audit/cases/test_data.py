"""Data: what is drawn depends on texts, size and seed alone; the others are others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.audit.cases.data import INVENTED, INVENTED_TEXTS, DataSet, read_data
from unmask.errors import InputError

NOTES = DataSet("notes", tuple(f"text {number}" for number in range(9)), "notes.txt")


@given(num_texts=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_a_batch_and_others_that_are_not_in_it(num_texts, seed):
    batch, others = NOTES.draw(num_texts, seed)
    assert len(batch) == len(set(batch)) == num_texts
    assert set(batch) <= set(NOTES.texts)
    assert len(others) == num_texts
    assert not set(batch) & set(others)
    assert set(others) <= {*NOTES.texts, *INVENTED_TEXTS}
    assert (batch, others) == NOTES.draw(num_texts, seed)


def test_what_is_drawn_does_not_depend_on_names_or_places():
    """Only texts, size and seed: so every protocol and defence gets the same batch."""
    assert DataSet("elsewhere", NOTES.texts, None).draw(3, 0) == NOTES.draw(3, 0)


def test_seeds_draw_differently():
    assert len({tuple(NOTES.draw(3, seed)[0]) for seed in range(20)}) > 10


def test_others_come_from_the_same_data_where_it_has_enough():
    _, others = NOTES.draw(4, 1)
    assert set(others) <= set(NOTES.texts)


def test_texts_that_occur_twice_are_no_others():
    twice = DataSet("twice", ("same", "same", "same", "other"))
    for seed in range(5):
        batch, others = twice.draw(2, seed)
        assert not set(batch) & set(others)


def test_too_few_texts():
    with pytest.raises(InputError, match="'notes' has 9 texts, fewer than the batch size 10"):
        NOTES.draw(10, 0)


def test_the_hash_is_of_the_texts():
    assert DataSet("x", NOTES.texts).sha256 == NOTES.sha256
    assert DataSet("notes", NOTES.texts[::-1]).sha256 != NOTES.sha256
    assert DataSet("a", ("b c",)).sha256 != DataSet("a", ("b", "c")).sha256


def test_files_and_lists(tmp_path: Path):
    (tmp_path / "texts.txt").write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    tables = {"file": {"file": "texts.txt", "limit": 2}, "list": {"texts": ["ä", "b"]}}
    found = read_data(tables, tmp_path)
    assert found["file"] == DataSet("file", ("one", "two"), "texts.txt")
    assert found["list"] == DataSet("list", ("ä", "b"))
    assert found[INVENTED].texts == INVENTED_TEXTS


@pytest.mark.parametrize(
    ("table", "part"),
    [
        *((3, "not understood"), ({}, "not understood"), ({"file": "a", "texts": ["b"]}, "not understood")),
        *(
            ({"file": "a", "lines": 3}, "not understood"),
            ({"file": 3}, "must be a path"),
            ({"file": "none"}, "no file"),
            ({"file": "."}, "is a folder"),
        ),
        *(({"texts": []}, "none empty"), ({"texts": "abc"}, "none empty"), ({"texts": ["a", " "]}, "none empty")),
        *(({"texts": ["a"], "limit": 0}, "limit"), ({"texts": ["a"], "limit": True}, "limit")),
    ],
)
def test_data_that_is_not_understood(tmp_path, table, part):
    with pytest.raises(InputError, match=part):
        read_data({"notes": table}, tmp_path)


def test_a_file_is_looked_up_beside_the_plan_and_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("here, and not beside the plan")
    with pytest.raises(InputError) as caught:
        read_data({"notes": {"file": "texts.txt"}}, Path("plans"))
    assert f"there is no file {tmp_path / 'plans' / 'texts.txt'}; files are looked up beside the plan" in str(
        caught.value
    )


def test_the_built_in_name_is_taken(tmp_path):
    with pytest.raises(InputError, match="another name"):
        read_data({INVENTED: {"texts": ["a"]}}, tmp_path)


def test_invented_texts_differ():
    assert len(set(INVENTED_TEXTS)) == len(INVENTED_TEXTS) >= 16
