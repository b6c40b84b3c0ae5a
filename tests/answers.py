"""What a command of unmask answered: its exit code, and what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        """Standard output as one line."""
        return " ".join(self.out.split())

    @property
    def message(self) -> str:
        """Standard error as one line."""
        return " ".join(self.err.split())

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Answer]
