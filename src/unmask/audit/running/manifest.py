"""What makes a run repeatable: versions, hardware, and the hashes of plan, models and data."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unmask import __version__
from unmask.audit.findings.folder import SCHEMA
from unmask.audit.plan import Plan
from unmask.models.catalog import resolve
from unmask.models.load import load_model

_PACKAGES = ("torch", "transformers", "numpy", "scipy", "safetensors", "opacus", "peft", "ray", "flwr")


def make_manifest(plan: Plan, *, engine: str, threads: int, command: str) -> dict[str, Any]:
    """The manifest of an audit, every case of the plan included."""
    return {
        **describe_machine(),
        "engine": engine,
        "threads": threads,
        "command": command,
        "plan": {"path": str(plan.path), "sha256": plan.sha256, "title": plan.title},
        "models": {name: {"files": hash_model(name)} for name in plan.models},
        "data": {
            name: {"sha256": data.sha256, "num_texts": len(data.texts), "path": data.path}
            for name, data in plan.data.items()
        },
        "cases": [
            {"id": case.id, "gates": list(case.gates), "line": case.line, "case": dict(case.spec)}
            for case in plan.cases
        ],
    }


def describe_machine() -> dict[str, Any]:
    """Versions and hardware, and the time."""
    return {
        "schema": SCHEMA,
        "unmask": __version__,
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": _gpu(),
            "system": platform.platform(),
        },
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hash_model(name: str) -> dict[str, str]:
    """Hashes of the files that a model is loaded from; empty for a name of a hub, which findings fingerprint."""
    folder = resolve(name)
    if not isinstance(folder, Path):
        return {}
    kept = (".safetensors", ".json", ".txt", ".model")
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.suffix in kept and path.is_file()}


def fingerprint_model(name: str) -> str:
    """What findings call `model_fingerprint`, of the weights that the name stands for now. It loads the model."""
    return load_model(name).fingerprint()


def sha256_of(path: Path, progress: Callable[[int], None] = lambda size: None) -> str:
    """The hash of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
