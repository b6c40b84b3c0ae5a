"""The data of a plan: named lists of texts, their hash, and the batch that a case draws from them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unmask.errors import InputError

INVENTED = "invented"


@dataclass(frozen=True)
class DataSet:
    """Texts under a name. `path` is where they come from, for the manifest."""

    name: str
    texts: tuple[str, ...]
    path: str | None = None

    @cached_property
    def sha256(self) -> str:
        """The hash of the texts, wherever they lie."""
        return hashlib.sha256(json.dumps(self.texts).encode("ascii")).hexdigest()

    def draw(self, num_texts: int, seed: int) -> tuple[list[str], list[str]]:
        """A batch, and as many other texts: what somebody guesses who knows the data but not the batch.

        The same for every protocol and defence, so that their findings can be compared. Where the data has too few
        texts, the others are invented ones; where these are too few as well, there are none.
        """
        if num_texts > len(self.texts):
            raise InputError(
                f"the data '{self.name}' has {len(self.texts)} texts, fewer than the batch size {num_texts}; "
                "use a smaller batch or more data"
            )
        order = list(self.texts)
        random.Random(f"{self.sha256} {num_texts} {seed}").shuffle(order)
        batch, rest = order[:num_texts], order[num_texts:]
        others = list(dict.fromkeys(text for text in (*rest, *INVENTED_TEXTS) if text not in batch))
        return batch, others[:num_texts] if len(others) >= num_texts else []


def read_data(tables: Mapping[str, Any], folder: Path) -> dict[str, DataSet]:
    """The data sets of a plan, files relative to its folder; the invented texts are always there."""
    found = {INVENTED: DataSet(INVENTED, INVENTED_TEXTS)}
    for name, table in tables.items():
        if name == INVENTED:
            raise InputError(f"the data '{INVENTED}' is built in; give yours another name")
        found[name] = _data_set(name, table, folder)
    return found


def _data_set(name: str, table: Any, folder: Path) -> DataSet:
    usage = f'write [data.{name}] with file = "texts.txt" (one text a line), or texts = ["…"]; limit = 100 if wanted'
    if (
        not isinstance(table, Mapping)
        or ("file" in table) == ("texts" in table)
        or set(table) - {"file", "texts", "limit"}
    ):
        raise InputError(f"the data '{name}' is not understood; {usage}")
    limit = table.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InputError(f"the data '{name}': limit must be a whole number from 1 on, got {limit!r}")
    if "file" in table:
        if not isinstance(table["file"], str):
            raise InputError(f"the data '{name}': file must be a path, got {table['file']!r}; {usage}")
        path = folder / table["file"]
        if not path.exists():
            why = f"there is no file {path.absolute()}; files are looked up beside the plan"
            raise InputError(f"the data '{name}': {why}")
        return DataSet(name, tuple(read_texts(path, limit)), table["file"])
    texts = table["texts"]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"the data '{name}': texts must be a list of texts, none empty; {usage}")
    return DataSet(name, tuple(texts[:limit]))


INVENTED_TEXTS = (
    "Patient Maria Keller, born 4 May 1961, was admitted with chest pain and shortness of breath.",
    "Please wire 48,200 euros to the account that ends in 7713 before Friday noon.",
    "The merger with Northwind stays confidential until the board has voted.",
    "My new address is 18 Harbour Lane, second floor, ring at Petersen.",
    "She told me that she has been seeing a therapist since last winter.",
    "The password of the shared drive is still the name of our first dog.",
    "We will close the plant in Leeds in March and let 120 people go.",
    "The biopsy was positive, and the treatment starts on Monday.",
    "He failed the drug test twice, so the offer was withdrawn.",
    "Our real margin is eleven percent, not the eighteen in the brochure.",
    "The children are alone at home from three to five every weekday.",
    "I voted for the other party this time, do not tell my father.",
    "The spare key lies under the blue flower pot behind the garage.",
    "The witness lives in Graz now and works at the central station.",
    "Her salary is 96,000 a year, with a bonus of two months in December.",
    "The prototype fails above 60 degrees, and the customer must not know.",
)


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
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; give a UTF-8 file with one text a line") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}); give one text a line") from None
