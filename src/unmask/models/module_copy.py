"""A copy of a transformers model in another precision or on another device, without blocks that are not needed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def copy_module(module: nn.Module, device: torch.device, dtype: torch.dtype, left_out: Sequence[nn.Module] = ()) -> Any:
    """Every parameter is copied once, in its new precision; modules left out are empty in the copy."""
    dropped = {id(weights) for part in left_out for weights in part.parameters()}
    copied: dict[int, Any] = {id(part): nn.Identity() for part in left_out}
    for weights in module.parameters():
        if id(weights) not in dropped:
            twin = weights.detach().to(device, dtype, copy=True)
            copied[id(weights)] = nn.Parameter(twin, weights.requires_grad)
    return copy.deepcopy(module, copied).to(device=device, dtype=dtype)
