"""What a bill shows: how often each token occurred, and no order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class CountEvidence:
    """One number for each token of the vocabulary."""

    counts: Tensor

    @classmethod
    def of(cls, tokens: Tensor, vocab_size: int) -> CountEvidence:
        """The bill of a batch."""
        return cls(torch.bincount(tokens.flatten(), minlength=vocab_size).double())

    def named_tensors(self) -> Mapping[str, Tensor]:
        """What defences change."""
        return {"counts": self.counts}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> CountEvidence:
        """The same bill with other numbers."""
        return replace(self, counts=tensors["counts"])
