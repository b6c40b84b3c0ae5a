"""Qdrant's local mode: a folder with one SQLite file a collection, in which every point is a pickle.

Pickles are not loaded, as that runs what they say. Their opcodes are listed instead, as a disassembler does, and the
numbers behind the word 'vector' are taken; the payload behind it is passed over.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from unmask.errors import EvidenceError
from unmask.integrations.stores.stored import StoredVectors, choose_one, stored_rows

_ONE = ""  # the name of vectors that have none
_PASSED = ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "FRAME", "MARK", "BINGET", "LONG_BINGET")
_NUMBERS = ("BINFLOAT", "BININT", "BININT1", "BININT2")


def read_qdrant(path: Path, collection: str | None, limit: int | None, model_width: int | None) -> StoredVectors:
    """Vectors of a collection; `collection` may be 'collection/name' where its vectors have names."""
    try:
        listed = sorted(json.loads((path / "meta.json").read_text())["collections"])
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"meta.json of {path} is damaged ({error!r}); copy the folder again") from None
    asked, _, kind = (collection or "").partition("/")
    name = choose_one(listed, asked or None, "collection", path, "one with points")
    points = list(_points(path / "collection" / name / "storage.sqlite", limit))
    kinds = sorted({found for _, vectors in points for found in vectors})
    if not kinds:
        raise EvidenceError(f"the collection '{name}' of {path} has no vectors")
    chosen = _ONE if kinds == [_ONE] else choose_one(kinds, kind or None, "vector", f"the collection '{name}'")
    rows = [(point, vectors[chosen]) for point, vectors in points if chosen in vectors]
    if len({len(vector) for _, vector in rows}) != 1:
        raise EvidenceError(f"the collection '{name}' has vectors of several widths, or of none")
    about = f"collection '{name}'" + (f", vectors '{chosen}'" if chosen else "")
    # The client takes and keeps Python's floats; models make float32.
    return stored_rows(np.array([vector for _, vector in rows], dtype=np.float32), [point for point, _ in rows], about)


def _points(file: Path, limit: int | None) -> Iterator[tuple[str, dict[str, list[float]]]]:
    if not file.is_file():
        raise EvidenceError(
            f"there is no {file}: only the local mode of Qdrant's client is read; export a server's points first "
            "(client.scroll(…, with_vectors=True)) and save them as .npy"
        )
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            rows = database.execute(
                "SELECT id, point FROM points LIMIT ?", (-1 if limit is None else limit,)
            ).fetchall()
    except sqlite3.Error as error:
        raise EvidenceError(f"{file} cannot be read ({error}); copy the folder again") from None
    for name, point in rows:
        try:
            yield _id_of(name), vectors_in(point)
        except (ValueError, TypeError, binascii.Error) as error:
            raise EvidenceError(f"a point of {file} is not as Qdrant's client writes them ({error})") from None


def _id_of(name: str) -> str:
    """The id that the pickle in a row's name holds: its one number or text."""
    held = [argument for _, argument in _opcodes(base64.b64decode(name)) if isinstance(argument, (int, str))]
    return str(held[-1]) if held else name


def vectors_in(point: bytes) -> dict[str, list[float]]:
    """Lists of numbers behind the word 'vector' in a pickle, by their names; nothing is executed."""
    steps = deque(_opcodes(point))
    while steps and steps.popleft()[1] != "vector":
        pass
    if not steps:
        raise ValueError("there is no field 'vector'")
    if steps[0][0] != "EMPTY_DICT":
        return {_ONE: _numbers(steps)}
    steps.popleft()
    found: dict[str, list[float]] = {}
    while steps and isinstance(name := steps.popleft()[1], str):
        if steps[0][0] == "EMPTY_LIST":
            found[name] = _numbers(steps)
    return found


def _numbers(steps: deque[tuple[str, Any]]) -> list[float]:
    """The numbers of the list that begins here; pickles fill a long list piece by piece."""
    code, _ = steps.popleft()
    numbers: list[float] = []
    while code == "EMPTY_LIST" and steps[0][0] in (*_NUMBERS, "APPENDS", "APPEND"):
        kind, argument = steps.popleft()
        if kind in _NUMBERS:
            numbers.append(float(argument))
    if not numbers:
        raise ValueError(f"a vector begins with the opcodes {code}, {steps[0][0]} where a list of numbers should")
    return numbers


def _opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """Opcodes and their arguments, without those that only keep books."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _PASSED:
            yield opcode.name, argument
