"""A hash that tells whether two models have the same weights, whatever precision they are kept in."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SAMPLE = 64  # entries of each tensor


def fingerprint_of(
    family: str, parameters: Iterable[tuple[str, Tensor]], rounded_to: torch.dtype | None = torch.bfloat16
) -> str:
    """A hash of shapes and of a sample of the weights, the same in every float type.

    Weights are rounded to bfloat16 before hashing, so a float32 model and its bfloat16 copy agree; with `rounded_to`
    None they are not, and only weights that are equal to the last digit agree.
    """
    digest = hashlib.sha256(family.encode())
    for name, parameter in sorted(parameters):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLE)].to(rounded_to or flat.dtype).cpu().contiguous()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def copy_module(module: nn.Module, device: torch.device, dtype: torch.dtype, left_out: Sequence[nn.Module] = ()) -> Any:
    """Every parameter is copied once, in its new precision; modules left out are empty in the copy."""
    dropped = {id(weights) for part in left_out for weights in part.parameters()}
    copied: dict[int, Any] = {id(part): nn.Identity() for part in left_out}
    for weights in module.parameters():
        if id(weights) not in dropped:
            cast = weights.detach().to(device, dtype, copy=True)
            copied[id(weights)] = nn.Parameter(cast, weights.requires_grad)
    made: Any = copy.deepcopy(module, copied).to(device=device, dtype=dtype)
    if dtype is torch.float64 and getattr(made, "_can_set_experts_implementation", bool)():
        made.set_experts_implementation("eager")  # grouped kernels have no double precision
    return made
