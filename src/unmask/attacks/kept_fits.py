"""What takes long to fit on a model is fitted once: its numbers are kept on disk, beside the converted models."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.models.gguf_cache import cache_folder
from unmask.whole_files import written_whole


def fit_once(
    kind: str, name: str, fit: Callable[[], Mapping[str, Tensor]], device: torch.device
) -> Mapping[str, Tensor]:
    """What is kept of a kind under a name; fitted where nothing is, or what is there is damaged.

    The name tells all that the numbers depend on: the weights, the settings, and a version of the code.
    """
    key = hashlib.sha256(name.encode()).hexdigest()
    path = cache_folder().parent / kind / f"{key[:32]}.safetensors"
    with contextlib.suppress(OSError, SafetensorError):
        kept = _read(path, key, device)
        if kept is not None:
            return kept
    fitted = fit()
    with contextlib.suppress(OSError):  # a disk that is full or read-only costs the next fit, not this result
        _write(path, key, fitted)
    return fitted


def _read(path: Path, key: str, device: torch.device) -> Mapping[str, Tensor] | None:
    """What a file holds; None where it is another one's, or its numbers are not those that were written."""
    with safe_open(path, "pt", device=str(device)) as file:
        said = file.metadata() or {}
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a mapping
    return kept if said == {"name": key, "numbers": _digest(kept)} else None


def _write(path: Path, key: str, fitted: Mapping[str, Tensor]) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in fitted.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        save_file(tensors, temporary, metadata={"name": key, "numbers": _digest(tensors)})


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
