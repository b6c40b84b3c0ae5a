"""Texts from files: one a line, or columns of a TSV."""

from __future__ import annotations

from pathlib import Path

from unmask.errors import InputError


def read_texts(path: Path, limit: int | None) -> list[str]:
    """Texts of a file, one a line, empty lines left out; of a TSV the first column."""
    lines = _lines(path)
    if path.suffix == ".tsv":
        lines = [line.split("\t")[0] for line in lines]
    texts = [line for line in lines if line.strip()][:limit]
    if not texts:
        raise InputError(f"{path} holds no text; give one text a line")
    return texts


def read_pairs(path: Path, limit: int | None) -> list[tuple[str, str]]:
    """Pairs of texts of a file, one a line with a tab between the two; of a TSV the first two columns."""
    columns = [line.split("\t", -1 if path.suffix == ".tsv" else 1) for line in _lines(path) if line.strip()][:limit]
    for number, parts in enumerate(columns, start=1):
        if len(parts) < 2:
            raise InputError(f"pair {number} of {path} has no tab; give two texts a line with a tab between them")
    if not columns:
        raise InputError(f"{path} holds no pair; give two texts a line with a tab between them")
    return [(parts[0], parts[1]) for parts in columns]


def _lines(path: Path) -> list[str]:
    try:
        # Not splitlines, which also cuts at separators that may stand inside of a text.
        return [line.removesuffix("\r") for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; give a UTF-8 file with one text a line") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}); give one text a line") from None
