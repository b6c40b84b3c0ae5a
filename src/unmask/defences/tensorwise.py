"""Changing an update tensor by tensor: what every defence keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence


def change_tensors(evidence: GradientEvidence, change: Callable[[str, Tensor], Tensor]) -> GradientEvidence:
    """The update with `change(name, tensor)` in place of each tensor; names, order, shapes, dtypes and devices stay.

    `change` computes in float32 at least and must not write into what it is given. It is called in the order of names,
    so that a seed gives the same result however the mapping is ordered, e.g. after a file was read.
    """
    changed = {name: _changed(name, evidence.gradients[name], change) for name in sorted(evidence.gradients)}
    return replace(evidence, gradients={name: changed[name] for name in evidence.gradients})


def _changed(name: str, tensor: Tensor, change: Callable[[str, Tensor], Tensor]) -> Tensor:
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    result = change(name, wide).to(tensor.dtype)
    if not bool(torch.isfinite(result).all()):
        raise InputError(
            f"this defence takes '{name}' beyond {torch.finfo(tensor.dtype).max:g}, the largest number of "
            f"{tensor.dtype}; use a weaker setting, or send the update in a wider type"
        )
    return result
