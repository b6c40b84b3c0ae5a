"""Tables of templates are kept: in the process, and on disk beside the converted models.

A table is a function of the weights and the layer alone and holds nothing of anybody's text, so it may be shared. Files
are safetensors, written whole or not at all; a file that cannot be read is made again.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.attacks.outputs.templates import Templates, TokenStates, measure_templates, middle_layer_of
from unmask.attacks.progress import Progress, silent
from unmask.models.adapter import Model
from unmask.models.gguf_cache import cache_folder

_VERSION = 1
_WORTH_KEEPING = 2**24  # entries of a table: smaller ones are made again faster than they are read
_TABLES = ("seen", "middle", "alone")
_kept: dict[str, Templates] = {}


def templates_for(model: Model, layer: int, normed: bool = False, progress: Progress = silent) -> Templates:
    """The tables of a model and a layer, measured once."""
    name = f"templates-{_VERSION}-{model.fingerprint()[:16]}-{layer}{'n' if normed else ''}-{model.dtype}"
    key = f"{name}-{model.device}"
    if key not in _kept:
        worth = model.vocab_size * model.width >= _WORTH_KEEPING
        path = cache_folder().parent / "templates" / f"{name.replace('torch.', '')}.safetensors"
        tables = _read(path, middle_layer_of(model, layer), model.device) if worth else None
        if tables is None:
            tables = measure_templates(model, layer, normed, progress)
            if worth:
                _write(path, tables)
        _kept.clear()  # one table is large; whoever reads two layers in turn reads it from disk
        _kept[key] = tables
    return _kept[key]


def _write(path: Path, tables: Templates) -> None:
    """Keep the tables if the disk lets us; that it does not is no reason to fail."""
    tensors: dict[str, Tensor] = {}
    for name in _TABLES:
        table: TokenStates = getattr(tables, name)
        tensors |= {
            f"{name}.templates": table.templates,
            f"{name}.shift": table.shift,
            f"{name}.covariance": table.covariance,
        }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except (OSError, SafetensorError):
        pass


def _read(path: Path, middle_layer: int, device: torch.device) -> Templates | None:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        tables: dict[str, Any] = {
            name: TokenStates(tensors[f"{name}.templates"], tensors[f"{name}.shift"], tensors[f"{name}.covariance"])
            for name in _TABLES
        }
        return Templates(middle_layer, **tables)
    except (OSError, SafetensorError, KeyError):
        return None
