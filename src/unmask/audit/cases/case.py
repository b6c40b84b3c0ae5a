"""A case: one cell of an audit, said in plain data. Its id is the hash of what it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unmask.audit.cases.case_names import model_and_case


def case_id(spec: Mapping[str, Any]) -> str:
    """Equal for equal specifications, whatever the order of their keys."""
    document = json.dumps(spec, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(document.encode("ascii")).hexdigest()[:16]


@dataclass(frozen=True)
class Case:
    """A specification, with its gates, its time limit in seconds and the line of the plan that it comes from.

    These are no part of the id: a finding stays when a gate is added.
    """

    spec: Mapping[str, Any]
    gates: tuple[str, ...] = ()
    line: int = 1
    time_limit: float | None = None

    @property
    def id(self) -> str:
        """The hash of the specification."""
        return case_id(self.spec)

    @property
    def seed(self) -> int:
        """A seed for everything random that is this case's own, the noise of defences above all."""
        return int(self.id[:12], 16)

    def __getitem__(self, key: str) -> Any:
        return self.spec[key]

    def __str__(self) -> str:
        return model_and_case(self.spec)
