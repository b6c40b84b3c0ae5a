"""A process that never saw the layer: for each job, an attack's settings and a ledger of answers. Nobody can be asked.

Run as `python replay_answers.py JOBS.json`; answers with one JSON document on standard output.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import OracleEvidence
from unmask.recovery import Recovery

ABOUT = "a small layer"


class Gone:
    """An oracle that is not there any more."""

    name = ABOUT

    def pieces(self, sequences: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        raise AssertionError(f"{len(sequences)} questions were asked that the ledger does not know")


def job_of(attack: Any, width: int, max_norm: float | None, path: Path) -> dict[str, Any]:
    """What the other process is told."""
    home, settings = type(attack), dataclasses.asdict(attack)
    return {
        "module": home.__module__,
        "attack": home.__name__,
        "settings": settings,
        "evidence": {"width": width, "max_norm": max_norm},
        "ledger": str(path),
    }


def document(recovery: Recovery[Any]) -> dict[str, Any]:
    """Everything of a recovery but its seconds, as text that keeps floats to their last digit."""
    whole = _plain(recovery)
    del whole["cost"]["seconds"]
    return {**whole, "status": recovery.status.name}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return repr(value.tolist())  # as text, in which NaN equals NaN
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # sets have no order that two processes share
    return repr(value)


def replay(job: dict[str, Any]) -> dict[str, Any]:
    """Open the ledger, attack, answer."""
    attack = getattr(import_module(job["module"]), job["attack"])(**job["settings"])
    with closing(Ledger(job["ledger"], about=ABOUT)) as ledger:
        return document(attack(OracleEvidence(Gone(), ledger=ledger, **job["evidence"])))


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    json.dump({name: replay(job) for name, job in jobs.items()}, sys.stdout)


if __name__ == "__main__":
    main()
