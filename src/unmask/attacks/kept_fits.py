"""What takes long to fit on a model is fitted once: its numbers are kept on disk, beside the converted models."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from unmask.models.gguf_cache import cache_folder
from unmask.whole_files import written_whole


def fit_once(
    kind: str, name: str, fit: Callable[[], Mapping[str, Tensor]], device: torch.device
) -> Mapping[str, Tensor]:
    """What is kept of a kind under a name; fitted where nothing is, or what is there is damaged.

    The name tells all that the numbers depend on: the weights, the settings, and a version of the code.
    """
    path = cache_folder().parent / kind / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"
    with contextlib.suppress(OSError, SafetensorError):
        return load_file(path, device=str(device))
    fitted = fit()
    with contextlib.suppress(OSError):  # a disk that is full or read-only costs the next fit, not this result
        _write(path, fitted)
    return fitted


def _write(path: Path, fitted: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        save_file({key: value.detach().cpu().contiguous() for key, value in fitted.items()}, temporary)
