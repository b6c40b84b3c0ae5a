"""Updates as people have them on disk: files of gradients or of weights, folders of models and of PEFT adapters.

    gradients   tensors by the names of named_parameters()
    weights     after − before, in float32 or wider; tensors that did not move are left out
    PEFT        adapter_model.safetensors and adapter_config.json; the scale of a module is alpha/rank, or alpha/√rank

Only safetensors, .npz and JSON are read.

Limits: plain LoRA; DoRA, LoRA biases and other methods of PEFT are refused by name. All tensors are held in memory.
Cost: reading the files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence.captured import name_tensors, plain_name
from unmask.evidence.foreign_files import PICKLES, pickle_error, read_arrays
from unmask.models.adapter import Model
from unmask.models.peft_adapters import Scale

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_WHOLE, _SHARDS = "model.safetensors", "model.safetensors.index.json"
_MOVED = 1e-2  # of a tensor's norm: weights that were given as those before are nearer to the model's


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Floating-point tensors of a safetensors file or a .npz, or of a folder that `save_pretrained` wrote, by name."""
    if not path.exists():
        raise EvidenceError(f"there is no file or folder {path}")
    tensors: dict[str, Tensor] = {}
    for file in _files_of(path) if path.is_dir() else [path]:
        if not file.is_file():
            raise EvidenceError(f"there is no file {file}; copy the whole folder")
        tensors |= read_arrays(file)
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not floats:
        raise EvidenceError(f"{path} holds {len(tensors)} tensors, and none of floating-point numbers")
    return floats


def _files_of(folder: Path) -> list[Path]:
    for name in (ADAPTER, _WHOLE):
        if (folder / name).is_file():
            return [folder / name]
    if (folder / _SHARDS).is_file():
        try:
            shards = json.loads((folder / _SHARDS).read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / Path(str(shard)).name for shard in dict.fromkeys(shards)]
        except (ValueError, KeyError, AttributeError) as error:
            raise EvidenceError(f"{folder / _SHARDS} is damaged ({error!r}); copy it again") from None
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
            raise pickle_error(file)
    raise EvidenceError(
        f"the folder {folder} holds neither {ADAPTER} nor {_WHOLE}; give one that save_pretrained wrote"
    )


def is_adapter(path: Path) -> bool:
    """Whether a folder is a PEFT adapter's."""
    return (path / ADAPTER_CONFIG).is_file()


def read_scale(folder: Path, factors: Mapping[str, Tensor]) -> Scale:
    """alpha/rank of a PEFT adapter, by module where it differs; `factors` are its tensors, as the file names them."""
    config = _read_config(folder)
    modules = sorted({plain_name(name).rpartition(".lora_")[0] for name in factors if ".lora_" in name})
    if not modules:
        raise EvidenceError(f"{folder} holds no LoRA factors ('….lora_A.weight')")
    scales = {module: _scale_of(config, module, folder) for module in modules}
    first = scales[modules[0]]
    return first if all(scale == first for scale in scales.values()) else scales


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except FileNotFoundError:
        raise EvidenceError(
            f"{folder} holds no {ADAPTER_CONFIG}; give a folder that PEFT's save_pretrained wrote"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"{folder / ADAPTER_CONFIG} is damaged ({error!r}); copy it again") from None
    if kind != "LORA":
        raise EvidenceError(f"the adapter in {folder} is {kind!r}, which cannot be read; plain LoRA can")
    for name, words in (("use_dora", "DoRA"), ("lora_bias", "LoRA with a bias beside its factors")):
        if config.get(name):
            raise EvidenceError(f"the adapter in {folder} is {words}, which cannot be read; plain LoRA can")
    return dict(config)


def _scale_of(config: Mapping[str, Any], module: str, folder: Path) -> float:
    """As PEFT computes it: a pattern is the end of a module's name."""
    values = []
    for key, patterns in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern")):
        found = [
            value
            for pattern, value in (config.get(patterns) or {}).items()
            if re.fullmatch(rf"(.*\.)?({pattern})", module)
        ]
        values.append(found[0] if found else config.get(key))
    alpha, rank = values
    if not isinstance(alpha, (int, float)) or not isinstance(rank, int) or rank < 1:
        raise EvidenceError(f"{folder / ADAPTER_CONFIG} has lora_alpha {alpha!r} and r {rank!r}; numbers are expected")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def subtract(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """after − before of the tensors that both have and that moved."""
    shared = [name for name in after if name in before]
    if not shared:
        raise EvidenceError(
            f"the weights before and after have no name in common (first: {next(iter(before), 'none')!r} and "
            f"{next(iter(after), 'none')!r}); save both in the same way"
        )
    moved = {}
    for name in shared:
        if after[name].shape != before[name].shape:
            raise EvidenceError(
                f"'{name}' has shape {tuple(before[name].shape)} before and {tuple(after[name].shape)} after; "
                "give two states of one model"
            )
        wide = torch.promote_types(torch.promote_types(after[name].dtype, before[name].dtype), torch.float32)
        difference = after[name].to(wide) - before[name].to(wide)
        if bool(difference.any()):
            moved[name] = difference
    if not moved:
        raise EvidenceError("the weights before and after are the same, so there is no update; is one file the other?")
    return moved


def weights_of(model: Model) -> dict[str, Tensor]:
    """The model's own weights, as those before."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def require_start(model: Model, before: Mapping[str, Tensor]) -> None:
    """Refuse weights that are given as those before and are not the model's."""
    own = weights_of(model)
    named = name_tensors(model, before)
    for name, tensor in named.items():
        if name not in own or own[name].shape != tensor.shape:
            continue
        weight = own[name].double()
        if float((tensor.double() - weight).norm()) > _MOVED * float(weight.norm()):
            raise EvidenceError(
                f"the weights before are not those of --model: '{name}' differs; load the model that the client "
                "started from (the same round, the same checkpoint)"
            )
