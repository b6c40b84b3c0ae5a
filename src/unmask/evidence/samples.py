"""Sequences that somebody else chose, with what a layer answered to them: samples, no questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.displays import DisplayedFields
from unmask.errors import EvidenceError
from unmask.evidence.files import reads, write
from unmask.evidence.tensors import require_floats

_LEAVE_OUT = "leave out samples whose numbers are not finite"


@dataclass(frozen=True, eq=False, repr=False)
class SampleEvidence(DisplayedFields):
    """Pairs (X, f(X)): `sequences` (samples, length, width), `answers` (samples,).

    Side knowledge: that the layer is attention, and nothing else. The adversary chose none of the sequences.
    """

    sequences: Float[Tensor, "m n d"]
    answers: Float[Tensor, " m"]

    def __post_init__(self) -> None:
        held = {"sequences": self.sequences, "answers": self.answers}
        for name, tensor in require_floats(held, _LEAVE_OUT).items():
            object.__setattr__(self, name, tensor)
        if self.sequences.ndim != 3 or 0 in self.sequences.shape:
            raise EvidenceError(f"sequences must be (samples, length, width), got {tuple(self.sequences.shape)}")
        if self.answers.shape != self.sequences.shape[:1]:
            raise EvidenceError(
                f"answers must be one number for each of {len(self.sequences)} sequences, got "
                f"{tuple(self.answers.shape)}"
            )

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return int(self.sequences.shape[2])

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.answers)

    def to(self, device: str | torch.device) -> SampleEvidence:
        """The same on another device."""
        return replace(self, sequences=self.sequences.to(device), answers=self.answers.to(device))

    def save(self, path: str | Path) -> Path:
        """Write a file that `load_evidence` reads."""
        return write(path, "samples", {"sequences": self.sequences, "answers": self.answers}, {})


@reads("samples")
def _read(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> SampleEvidence:
    return SampleEvidence(tensors["sequences"], tensors["answers"])
