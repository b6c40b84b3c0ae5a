"""A client's update as a federated-learning server sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence.files import reads, require_finite, write
from unmask.models.adapter import Model
from unmask.models.linear import Role


class Task(Enum):
    """What the client trained for."""

    NEXT_TOKEN = "next_token"
    CLASSIFICATION = "classification"


class Update(Enum):
    """What the tensors are: gradients of the loss, or the difference new − old of the weights."""

    GRADIENT = "gradient"
    DELTA = "delta"


@dataclass(frozen=True)
class GradientEvidence:
    """Gradients by canonical parameter name, as the family stores them; any subset of the parameters is legal.

    Side knowledge of the adversary, `None` meaning that it must be inferred: `task`, `num_texts`, and `compute_dtype`,
    the precision in which the client ran its model (the server sent it, so it is known as a rule).
    """

    gradients: Mapping[str, Tensor]
    model_fingerprint: str
    task: Task | None = None
    num_texts: int | None = None
    update: Update = Update.GRADIENT
    compute_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", None if self.task is None else Task(self.task))
        object.__setattr__(self, "update", Update(self.update))
        if self.num_texts is not None and (not isinstance(self.num_texts, int) or self.num_texts < 1):
            raise EvidenceError(f"num_texts must be a whole number from 1 on, or None, got {self.num_texts!r}")
        require_finite(self.gradients)

    @classmethod
    def of(cls, model: Model, tensors: Mapping[str, Tensor], **side_knowledge: Any) -> GradientEvidence:
        """Wrap tensors that were captured elsewhere, under the names that transformers gives them."""
        named = {model.canonical_name(name): tensor for name, tensor in tensors.items()}
        evidence = cls(named, model.fingerprint(), **side_knowledge)
        evidence.check(model)
        return evidence

    def check(self, model: Model) -> None:
        """Refuse evidence of another model: other weights, unknown parameters, other shapes."""
        fingerprint = model.fingerprint()
        if self.model_fingerprint != fingerprint:
            raise EvidenceError(
                f"this evidence was made with a model of fingerprint {self.model_fingerprint[:12]}, but the model "
                f"given has {fingerprint[:12]}; load the weights that the client started from "
                "(the same round, the same checkpoint)"
            )
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, tensor in self.gradients.items():
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                raise EvidenceError(
                    f"the gradient of '{name}' has shape {tuple(tensor.shape)}, the parameter has {shapes[name]}; "
                    "was it flattened or sharded on the way?"
                )
        if not set(shapes) & set(self.gradients):
            raise EvidenceError(
                f"none of the {len(self.gradients)} tensors is a parameter of this model (first: "
                f"{next(iter(self.gradients), 'none')!r}); names must be those of transformers' named_parameters()"
            )

    def linear(self, model: Model, role: Role, block: int) -> Float[Tensor, "d_in d_out"] | None:
        """The gradient of a linear layer as (d_in, d_out); None if the update does not hold it or it is zero."""
        layer = model.linear(role, block)
        if layer is None or layer.parameter not in self.gradients:
            return None
        gradient = layer.oriented(self.gradients[layer.parameter])
        return gradient if bool(gradient.any()) else None

    def only(self, *patterns: str) -> GradientEvidence:
        """The part of the update whose names contain one of the patterns."""
        kept = {name: g for name, g in self.gradients.items() if any(pattern in name for pattern in patterns)}
        return replace(self, gradients=kept)

    def to(self, device: str | torch.device) -> GradientEvidence:
        """The same evidence on another device."""
        return replace(self, gradients={name: g.to(device) for name, g in self.gradients.items()})

    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file."""
        header = {
            "model_fingerprint": self.model_fingerprint,
            "task": None if self.task is None else self.task.value,
            "num_texts": self.num_texts,
            "update": self.update.value,
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
        }
        return write(path, "gradients", self.gradients, header)


@reads("gradients")
def _read(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> GradientEvidence:
    dtype = getattr(torch, header["compute_dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown compute_dtype {header['compute_dtype']!r}")
    return GradientEvidence(
        gradients=tensors,
        model_fingerprint=str(header["model_fingerprint"]),
        task=None if header["task"] is None else Task(header["task"]),
        num_texts=header["num_texts"],
        update=Update(header["update"]),
        compute_dtype=dtype,
    )
