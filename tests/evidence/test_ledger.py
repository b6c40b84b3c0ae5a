"""The ledger: each answer once, kept at once, within the budget; and files that are no ledger."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import EvidenceError, InputError
from unmask.evidence.ledger import BudgetSpent, Ledger


def keys_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


class Asked:
    """Answers the number that a key stands for, in pieces, and remembers what it was asked."""

    def __init__(self, keys: list[bytes], piece: int = 2, stop_after: int | None = None) -> None:
        self.keys, self.piece, self.stop_after = keys, piece, stop_after
        self.heard: list[int] = []

    def __call__(self, places):
        for start in range(0, len(places), self.piece):
            if self.stop_after is not None and len(self.heard) >= self.stop_after:
                raise ConnectionError("the line is dead")
            some = list(places[start : start + self.piece])[::-1]
            numbers = [int.from_bytes(self.keys[place], "big") for place in some]
            self.heard += numbers
            yield some, np.array(numbers, dtype=float)


def fetch(ledger: Ledger, *numbers: int, **settings) -> tuple[list[float], list[int]]:
    asked = Asked(keys_of(*numbers), **settings)
    return ledger.fetch(asked.keys, asked).tolist(), sorted(asked.heard)


# Once


def test_a_question_is_asked_once_and_answers_come_in_order():
    ledger = Ledger()
    assert fetch(ledger, 3, 1, 3, 2) == ([3, 1, 3, 2], [1, 2, 3])
    assert fetch(ledger, 2, 5, 1) == ([2, 5, 1], [5])
    assert (len(ledger), ledger.num_paid, ledger.num_asked) == (4, 4, 7)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 20), max_size=12), max_size=6))
def test_what_is_paid_is_the_number_of_different_questions(batches):
    ledger, heard = Ledger(), []
    for batch in batches:
        answers, asked = fetch(ledger, *batch)
        assert answers == batch
        heard += asked
    assert sorted(heard) == sorted({number for batch in batches for number in batch})
    assert len(ledger) == ledger.num_paid == len(heard)


def test_answers_outlive_the_process_that_paid(tmp_path):
    path = tmp_path / "folder" / "ledger.sqlite"
    with closing(Ledger(path, about="a")) as ledger:
        fetch(ledger, 1, 2, 3)
    with closing(Ledger(path, about="a")) as ledger:
        assert fetch(ledger, 2, 3, 4) == ([2, 3, 4], [4])
        assert (len(ledger), ledger.num_paid) == (4, 1)


def test_vectors_and_exact_numbers_come_back(tmp_path):
    rows = np.array([[5e-324, -0.0], [1.7976931348623157e308, 0.1]])
    with closing(Ledger(tmp_path / "l")) as ledger:
        ledger.fetch(keys_of(1, 2), lambda places: iter([(places, rows)]))
    with closing(Ledger(tmp_path / "l")) as ledger:
        again = ledger.fetch(keys_of(2, 1), lambda places: iter(()))
    assert again.tobytes() == rows[::-1].tobytes()


def test_what_arrived_before_an_error_is_kept():
    ledger = Ledger()
    with pytest.raises(ConnectionError):
        fetch(ledger, 1, 2, 3, 4, 5, 6, stop_after=4)
    assert len(ledger) == 4
    assert fetch(ledger, 1, 2, 3, 4, 5, 6)[1] == [5, 6]


def test_an_oracle_that_answers_twice_is_counted_once():
    ledger = Ledger()
    answers = ledger.fetch(keys_of(1), lambda places: iter([(places, np.ones(1)), (places, np.ones(1))]))
    assert answers.tolist() == [1]
    assert len(ledger) == ledger.num_paid == 1


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([([0], np.ones(1))], "left 1 of 2 questions without an answer"),
        ([([0], np.ones(1)), ([1], np.ones((1, 3)))], "different shapes"),
        ([([], np.ones(0))], "left 2 of 2"),
    ],
)
def test_an_oracle_that_breaks_its_promise_is_told_so(pieces, message):
    with pytest.raises(EvidenceError, match=message):
        Ledger().fetch(keys_of(1, 2), lambda places: iter(pieces))


def test_thirty_thousand_questions_at_once(tmp_path):
    """No time is asserted; a quadratic step would show as minutes."""
    numbers = range(30_000)
    with closing(Ledger(tmp_path / "l")) as ledger:
        assert len(fetch(ledger, *numbers, piece=1000)[1]) == 30_000
        assert fetch(ledger, *numbers) == (list(numbers), [])


# The budget


def test_nothing_is_paid_beyond_the_budget_and_a_larger_one_continues(tmp_path):
    path = tmp_path / "l"
    with closing(Ledger(path, budget=5)) as ledger:
        fetch(ledger, 1, 2, 3)
        asked = Asked(keys_of(3, 4, 5, 6))
        with pytest.raises(BudgetSpent, match="3 of 5 queries were paid for and the next step needs 3 more"):
            ledger.fetch(asked.keys, asked)
        assert asked.heard == []
        assert fetch(ledger, 1, 2, 4, 5) == ([1, 2, 4, 5], [4, 5])
        assert fetch(ledger, 5, 4, 3, 2, 1)[1] == []
    with closing(Ledger(path, budget=6)) as ledger:
        assert fetch(ledger, 3, 4, 5, 6)[1] == [6]
        with pytest.raises(BudgetSpent):
            fetch(ledger, 7)


def test_a_budget_is_a_number_of_queries():
    with pytest.raises(InputError, match="budget must be 0 or more queries, got -1"):
        Ledger(budget=-1)
    with pytest.raises(BudgetSpent):
        fetch(Ledger(budget=0), 1)


# Files


def test_another_services_answers_are_not_mixed_in(tmp_path):
    Ledger(tmp_path / "l", about="https://a.example/").close()
    with pytest.raises(EvidenceError, match=r"answers of 'https://a.example/'.*'https://b.example/'.*another file"):
        Ledger(tmp_path / "l", about="https://b.example/")


def test_a_text_file_is_no_ledger_and_stays_as_it_is(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n" * 200)
    with pytest.raises(EvidenceError, match=r"notes.txt is not a ledger of answers .* name another file"):
        Ledger(path)
    assert path.read_text() == "buy milk\n" * 200


def test_a_foreign_database_is_refused_and_stays_as_it_is(tmp_path):
    path = tmp_path / "cookies.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE cookies (value TEXT)")
    before = path.read_bytes()
    with pytest.raises(EvidenceError, match=r"cookies.*name another file"):
        Ledger(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("share", [0.9, 0.5, 0.01])
def test_a_truncated_file_is_told(tmp_path, share):
    path = tmp_path / "l"
    with closing(Ledger(path)) as ledger:
        fetch(ledger, *range(2000), piece=2000)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(EvidenceError, match=r"damaged .* bring back a copy of it, or name another file"):
        Ledger(path)


@pytest.mark.parametrize("place", ["/proc/ledger.sqlite", "/proc/folder/ledger.sqlite"])
def test_a_folder_that_cannot_be_written_to_is_told(place):
    """Not even root can write there."""
    with pytest.raises(EvidenceError, match=r"cannot be used.*folder can be written to"):
        Ledger(place)


@contextmanager
def files_of_at_most(num_bytes: int):
    """What a full disk does to a write, for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_costs_nothing_that_was_kept(tmp_path):
    path = tmp_path / "l"
    with closing(Ledger(path)) as ledger:
        fetch(ledger, 1, 2)
        with files_of_at_most(100_000), pytest.raises(EvidenceError, match=r"cannot be used.*has space"):
            fetch(ledger, *range(3, 20_000), piece=500)
    with closing(Ledger(path)) as ledger:
        num_kept = len(ledger)
        assert 2 <= num_kept < 20_000
        assert len(fetch(ledger, *range(1, 20_000), piece=500)[1]) == 19_999 - num_kept


def test_two_processes_cannot_pay_from_one_ledger(commands, tmp_path):
    path = tmp_path / "l"
    script = tmp_path / "open.py"
    script.write_text(f"from unmask.evidence.ledger import Ledger; Ledger({str(path)!r})", encoding="utf-8")
    with closing(Ledger(path)):
        other = subprocess.run([commands / "python", script], capture_output=True, text=True, check=False)
    assert "is in use" in other.stderr
    assert "wait until whoever has it open has ended, or name another file" in other.stderr
    Ledger(path).close()
