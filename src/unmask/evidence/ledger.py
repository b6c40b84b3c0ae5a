"""Every answer of an oracle, once: counted, kept in SQLite, limited by a budget."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import Float

from unmask.errors import EvidenceError, InputError

FORMAT = "unmask ledger 1"
_PATIENCE_SECONDS = 2.0  # for a process that is just ending to let go of the file

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
    whose answers these are; a file about another service is refused. While a ledger is open nobody else can open its
    file: two askers would pay for the same questions twice, and neither would see what the other spends.
    """

    def __init__(self, path: str | Path | None = None, *, budget: int | None = None, about: str = "") -> None:
        if budget is not None and budget < 0:
            raise InputError(f"budget must be 0 or more queries, got {budget}")
        self.path = None if path is None else Path(path)
        self.budget = budget
        self.num_asked = 0  # in this process, whether paid for now or remembered
        self.num_paid = 0  # in this process
        self._connection = self._open(about)
        self._size = int(self._connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0])

    @property
    def was_used(self) -> bool:
        """Whether it held answers when it was opened."""
        return len(self) > self.num_paid

    def __len__(self) -> int:
        """The number of answers that were ever paid for."""
        return self._size

    def fetch(self, keys: Sequence[bytes], ask: Ask) -> Float[np.ndarray, "b *p"]:
        """The answers to questions with these keys; `ask` is called for those that were never answered."""
        with self._clear_errors():
            known = {key: answer for key in set(keys) if (answer := self._recall(key)) is not None}
        first_place = {key: place for place, key in reversed(list(enumerate(keys)))}
        missing = sorted(place for key, place in first_place.items() if key not in known)
        if self.budget is not None and len(self) + len(missing) > self.budget:
            raise BudgetSpent(self.budget, len(missing), len(self))
        self.num_asked += len(keys)
        if missing:
            for places, answers in ask(missing):
                rows = np.ascontiguousarray(answers, dtype=np.float64)
                heard = {keys[place]: row for place, row in zip(places, rows, strict=True)}
                with self._clear_errors():
                    self._keep(heard)
                known |= heard
        return _stack(keys, known)

    def close(self) -> None:
        """Close the file, so that others can open it. What was answered is in it already."""
        self._connection.close()

    def _recall(self, key: bytes) -> Float[np.ndarray, "*p"] | None:
        row = self._connection.execute("SELECT answer, shape FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        return np.frombuffer(row[0], dtype=np.float64).reshape([int(size) for size in row[1].split()])

    def _keep(self, heard: dict[bytes, Float[np.ndarray, "*p"]]) -> None:
        rows = [(key, row.tobytes(), " ".join(map(str, row.shape))) for key, row in heard.items()]
        with self._connection:
            # An oracle that answers a question twice is taken at its first word.
            kept = self._connection.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", rows).rowcount
        self._size += kept
        self.num_paid += kept

    def _open(self, about: str) -> sqlite3.Connection:
        """The database, made if it is new, refused if it is something else or about somebody else."""
        with self._clear_errors():
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path or ":memory:", timeout=_PATIENCE_SECONDS)
            try:
                seen = _header(connection, about)
            except BaseException:
                connection.close()
                raise
        if seen != (FORMAT, about):
            connection.close()
            raise EvidenceError(
                f"{self.path} holds the answers of '{seen[1]}' ({seen[0]}), but '{about}' ({FORMAT}) is asked now; "
                "name another file, so that answers do not mix"
            )
        return connection

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """What the disk and SQLite complain about, as a sentence that says what to do."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith("SQLITE_BUSY"):
                what, advice = "is in use", "wait until whoever has it open has ended, or name another file"
            elif name == "SQLITE_NOTADB":
                what, advice = "is not a ledger of answers", "name another file"
            elif name.startswith("SQLITE_CORRUPT"):
                what, advice = "is damaged", "bring back a copy of it, or name another file and ask everything again"
            else:
                what, advice = "cannot be used", "see that its folder can be written to and has space, then start again"
            raise EvidenceError(f"{self.path} {what} ({error}); {advice}") from None


def _header(connection: sqlite3.Connection, about: str) -> tuple[str, str]:
    """Format and service of the file, written first where it is new; nothing is written into a foreign database."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and tables != {"header", "answers"}:
        return f"a database of {', '.join(sorted(tables))}", "something else"
    if (fault := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        error = sqlite3.DatabaseError(fault)
        error.sqlite_errorname = "SQLITE_CORRUPT"
        raise error
    # In this mode a killed process loses nothing that was committed.
    connection.execute("PRAGMA journal_mode = WAL")
    with connection:
        connection.execute("BEGIN EXCLUSIVE")
        if not tables:
            connection.execute("CREATE TABLE header (format TEXT, about TEXT)")
            connection.execute("CREATE TABLE answers (key BLOB PRIMARY KEY, answer BLOB, shape TEXT) WITHOUT ROWID")
            connection.execute("INSERT INTO header VALUES (?, ?)", (FORMAT, about))
        return connection.execute("SELECT format, about FROM header").fetchone()


def _stack(keys: Sequence[bytes], known: dict[bytes, Float[np.ndarray, "*p"]]) -> Float[np.ndarray, "b *p"]:
    """The answers in the order of the questions; an oracle that left some out, or changed its shape, is refused."""
    num_unknown = sum(key not in known for key in keys)
    if num_unknown:
        raise EvidenceError(f"the oracle left {num_unknown} of {len(keys)} questions without an answer; it is broken")
    shapes = sorted({known[key].shape for key in keys})
    if len(shapes) > 1:
        raise EvidenceError(f"the oracle's answers have different shapes, {shapes[0]} and {shapes[-1]}; it is broken")
    return np.stack([known[key] for key in keys]) if len(keys) else np.zeros(0)
