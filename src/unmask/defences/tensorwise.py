"""Changing evidence tensor by tensor: what every defence of updates and of hidden states keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from unmask.errors import InputError


class TensorEvidence(Protocol):
    """Evidence that consists of tensors with names: an update, or hidden states with a row for each token."""

    def named_tensors(self) -> Mapping[str, Tensor]:
        """What the adversary sees, by name."""
        ...

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same evidence with other values under these names."""
        ...


AnyTensors = TypeVar("AnyTensors", bound=TensorEvidence)


def change_tensors(evidence: AnyTensors, change: Callable[[str, Tensor], Tensor]) -> AnyTensors:
    """The evidence with `change(name, tensor)` in place of each tensor; names, order, shapes, types and devices stay.

    `change` computes in float32 at least and must not write into what it is given. It is called in the order of names,
    so that a seed gives the same result however the mapping is ordered, e.g. after a file was read.
    """
    tensors = evidence.named_tensors()
    changed = {name: _change(name, tensors[name], change) for name in sorted(tensors)}
    return evidence.with_tensors({name: changed[name] for name in tensors})


def _change(name: str, tensor: Tensor, change: Callable[[str, Tensor], Tensor]) -> Tensor:
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    result = change(name, wide).to(tensor.dtype)
    if not bool(torch.isfinite(result).all()):
        raise InputError(
            f"this defence takes '{name}' beyond {torch.finfo(tensor.dtype).max:g}, the largest number of "
            f"{tensor.dtype}; use a weaker setting, or send the update in a wider type"
        )
    return result
