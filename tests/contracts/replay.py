"""A process that never saw the secret: for each job, a file of evidence, a model's recipe and an attack's settings.

Run as `python replay.py JOBS.json`; answers with one JSON document on standard output.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `tests`

import torch
from tests.contracts.recipes import make_model

import unmask
from unmask.recovery import RecoveredTexts, Recovery


def job_of(attack: Any, recipe: str, path: Path) -> dict[str, Any]:
    """What the other process is told."""
    return {
        "module": type(attack).__module__,
        "attack": type(attack).__name__,
        "settings": asdict(attack),
        "recipe": recipe,
        "evidence": str(path),
    }


def document(recovery: Recovery[RecoveredTexts]) -> dict[str, Any]:
    """Everything of a recovery but its seconds, as JSON keeps it (floats to their last digit)."""
    plain = {
        "texts": [asdict(text) for text in recovery.value.texts],
        "token_set": sorted(recovery.value.token_set),
        "status": recovery.status.name,
        "reason": recovery.reason,
        "certificate": asdict(recovery.certificate),
        "holds": recovery.certificate.holds,
        "cost": {name: value for name, value in asdict(recovery.cost).items() if name != "seconds"},
        "used": recovery.used,
    }
    return json.loads(json.dumps(plain, default=lambda member: member.value))  # kinds of ambiguities


def replay(job: dict[str, Any]) -> dict[str, Any]:
    """Load, attack, answer."""
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in job["settings"].items()}
    attack = getattr(import_module(job["module"]), job["attack"])(**settings)
    return document(attack(unmask.load_evidence(job["evidence"]), make_model(job["recipe"])))


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    json.dump({name: replay(job) for name, job in jobs.items()}, sys.stdout)


if __name__ == "__main__":
    main()
