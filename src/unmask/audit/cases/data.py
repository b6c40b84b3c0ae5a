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

from unmask.audit.cases.invented import INVENTED_TEXTS
from unmask.audit.cases.texts import read_texts
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
        return DataSet(name, tuple(read_texts(folder / table["file"], limit)), table["file"])
    texts = table["texts"]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"the data '{name}': texts must be a list of texts, none empty; {usage}")
    return DataSet(name, tuple(texts[:limit]))
