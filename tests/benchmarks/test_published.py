"""Every number of the paper's tables is read."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published")


def test_all_rows_of_all_tables(published):
    cells = published.published_cells()
    assert len(cells) == 124
    assert Counter(cell.table for cell in cells) == {1: 72, 2: 24, 3: 16, 6: 12}
    assert Counter(cell.method for cell in cells) == {
        "DAGER": 64,
        "TAG": 24,
        "LAMP": 24,
        "DAGER without rank cut": 12,
    }


def test_numbers_by_method(published):
    assert published.published("LAMP")["gpt2", "cola", 1] == (73.3, 43.3)
    assert published.published("TAG")["bert", "rotten_tomatoes", 8] == (25.4, 0.9)
    assert published.published("DAGER without rank cut")["gpt2", "sst2", 64] == (75.0, 69.7)
    assert published.published()["gpt2", "sst2", 64] == (92.9, 85.0)


def test_cells_that_two_tables_repeat_agree(published):
    by_cell: dict = {}
    for cell in published.published_cells():
        key = (cell.model, cell.data, cell.method, cell.texts)
        assert by_cell.setdefault(key, cell.rouge) == cell.rouge


def test_hours(published):
    hours = published.published_hours()
    assert Counter(method for _, _, method, _ in hours) == {"DAGER": 60, "TAG": 24, "LAMP": 24}
    assert hours["llama2-7b", "rotten_tomatoes", "DAGER", 128] == 523.1
    assert hours["bert", "rotten_tomatoes", "LAMP", 8] == 83.1
