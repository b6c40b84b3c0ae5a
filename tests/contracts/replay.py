"""A process that never saw the secret: for each job, an attack's settings, and a file of evidence or of answers.

Run as `python replay.py JOBS.json`; answers with one JSON document on standard output. One process runs all jobs.
Behind a file of answers nobody can be asked.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `tests`
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
from tests.contracts.clock import WorkClock
from tests.contracts.models import make_model

import unmask
from unmask.evidence.ledger import Ledger
from unmask.evidence.logits import LogitEvidence, LogitView
from unmask.evidence.oracles import OracleEvidence
from unmask.progress import tell, watched_by
from unmask.recovery import Recovery

ABOUT = "a small layer"


@dataclass(frozen=True)
class Gone:
    """An oracle that is not there any more; of a language model, what is known of its answers."""

    name: str = ABOUT
    vocab_size: int = 0
    view: LogitView | None = None

    def pieces(self, questions: Any) -> Iterator[Any]:
        raise AssertionError(f"{len(questions)} questions were asked that the ledger does not know")


# ---- what the other process is told


def pack(value: Any) -> Any:
    """Settings as JSON keeps them: an object is its class and its fields."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"class": [type(value).__module__, type(value).__name__], "fields": fields}


def unpack(value: Any) -> Any:
    """The object again."""
    if isinstance(value, dict):
        module, name = value["class"]
        fields = {field: unpack(packed) for field, packed in value["fields"].items()}
        return getattr(import_module(module), name)(**fields)
    return tuple(map(unpack, value)) if isinstance(value, list) else value


def pack_recovery(recovery: Recovery[Any]) -> dict[str, Any]:
    """Everything of a recovery but its seconds, as text that keeps floats to their last digit."""
    whole = _write(recovery)
    del whole["cost"]["seconds"]
    return {**whole, "status": recovery.status.name}


def _write(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())  # as text, in which NaN equals NaN
    if dataclasses.is_dataclass(value):
        return {field.name: _write(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _write(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_write(part) for part in value]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # sets have no order that two processes share
    return repr(value)


# ---- what it does


def replay(job: dict[str, Any]) -> dict[str, Any]:
    """Load, attack, answer; and what is wrong with what the attack told on its way."""
    attack, path = unpack(job["attack"]), job["path"]
    if "ledger of" not in job:
        evidence = unmask.load_evidence(path)
        return _watched(attack, evidence, *([make_model(job["model"])] if job.get("model") else []))
    with closing(Ledger(path, about=ABOUT)) as ledger:
        if job["ledger of"] == "logits":
            gone = Gone(vocab_size=job["vocab_size"], view=LogitView(**job["view"]))
            return _watched(attack, LogitEvidence(gone, ledger))  # type: ignore[arg-type]
        return _watched(attack, OracleEvidence(Gone(), job["width"], ledger, job["max_norm"]))


def _watched(attack: Any, *given: Any) -> dict[str, Any]:
    with WorkClock() as clock, watched_by(clock.hear):
        recovery = attack(*given, progress=tell)
    return {"recovery": pack_recovery(recovery), "faults": clock.faults()}


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    json.dump({name: replay(job) for name, job in jobs.items()}, sys.stdout)


if __name__ == "__main__":
    main()
