"""Every answer of an oracle, once: counted, kept in SQLite, limited by a budget."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from unmask.errors import EvidenceError, InputError

FORMAT = "unmask ledger 1"

# Given places in a list of questions, yields (places, answers) as they come in, in any order.
Ask = Callable[[Sequence[int]], Iterator[tuple[Sequence[int], Float[np.ndarray, "b *p"]]]]


class BudgetSpent(Exception):  # noqa: N818 (an ending, not an error)
    """The next questions would cost more than is left. Attacks catch it and return what they know."""

    def __init__(self, budget: int, wanted: int, paid: int) -> None:
        super().__init__(f"{paid:,} of {budget:,} queries were paid for and the next step needs {wanted:,} more")
        self.budget = budget


class Ledger:
    """Answers by question, in a SQLite file that outlives the process (or in memory, without a path).

    An answer is written as soon as it arrives, so a killed run that starts again asks only what it never heard. The
    budget counts answers that were ever paid for, those of earlier runs with the same file included. `about` says
    whose answers these are; a file about another service is refused.
    """

    def __init__(self, path: str | Path | None = None, *, budget: int | None = None, about: str = "") -> None:
        if budget is not None and budget < 0:
            raise InputError(f"budget must be 0 or more queries, got {budget}")
        self.path = None if path is None else Path(path)
        self.budget = budget
        self.num_asked = 0  # in this process, whether paid for now or remembered
        self.num_paid = 0  # in this process
        self._connection = self._opened(about)
        self._size = int(self._connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0])

    def __len__(self) -> int:
        """The number of answers that were ever paid for."""
        return self._size

    def fetch(self, keys: Sequence[bytes], ask: Ask) -> Float[np.ndarray, "b *p"]:
        """The answers to questions with these keys; `ask` is called for those that were never answered."""
        self.num_asked += len(keys)
        known = {key: answer for key in set(keys) if (answer := self._recall(key)) is not None}
        first_place = {key: place for place, key in reversed(list(enumerate(keys)))}
        missing = sorted(place for key, place in first_place.items() if key not in known)
        if self.budget is not None and len(self) + len(missing) > self.budget:
            raise BudgetSpent(self.budget, len(missing), len(self))
        if missing:
            for places, answers in ask(missing):
                rows = np.ascontiguousarray(answers, dtype=np.float64)
                known |= {keys[place]: row for place, row in zip(places, rows, strict=True)}
                self._keep([(keys[place], row.tobytes(), _shape(row)) for place, row in zip(places, rows, strict=True)])
        return np.stack([known[key] for key in keys]) if len(keys) else np.zeros(0)

    def close(self) -> None:
        """Close the file. What was answered is in it already."""
        self._connection.close()

    def _recall(self, key: bytes) -> Float[np.ndarray, "*p"] | None:
        row = self._connection.execute("SELECT answer, shape FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        return np.frombuffer(row[0], dtype=np.float64).reshape([int(size) for size in row[1].split()])

    def _keep(self, rows: list[tuple[bytes, bytes, str]]) -> None:
        with self._connection:
            self._connection.executemany("INSERT INTO answers VALUES (?, ?, ?)", rows)
        self._size += len(rows)
        self.num_paid += len(rows)

    def _opened(self, about: str) -> sqlite3.Connection:
        """The database, made if it is new, refused if it is something else or about somebody else."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path or ":memory:")
        try:
            with connection:
                # In this mode a killed process loses nothing that was committed.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("CREATE TABLE IF NOT EXISTS header (format TEXT, about TEXT)")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB, shape TEXT) WITHOUT ROWID"
                )
                if connection.execute("SELECT COUNT(*) FROM header").fetchone()[0] == 0:
                    connection.execute("INSERT INTO header VALUES (?, ?)", (FORMAT, about))
                seen = connection.execute("SELECT format, about FROM header").fetchone()
        except sqlite3.DatabaseError as error:
            connection.close()
            raise EvidenceError(f"{self.path} is not a ledger of answers ({error}); name another file") from None
        if seen != (FORMAT, about):
            connection.close()
            raise EvidenceError(
                f"{self.path} holds the answers of '{seen[1]}' ({seen[0]}), but '{about}' ({FORMAT}) is asked now; "
                "name another file, so that answers do not mix"
            )
        return connection


def _shape(row: Float[np.ndarray, "*p"]) -> str:
    return " ".join(map(str, row.shape))
