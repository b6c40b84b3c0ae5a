"""The table of defences of stored embeddings, by name: those of updates that change values, and some of their own.

Each vector is one tensor: 'int8' has a scale for each vector, relative noise is relative to its own length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from unmask.defences.table import DEFENCES
from unmask.defences.vectors import add_private_noise, cut_dimensions, keep_signs, rotate_secretly
from unmask.evidence.vectors import VectorEvidence
from unmask.specs import Kind, Spec, flag, number, whole_number

_EPSILON = number("epsilon", "a finite number above 0", lambda value: 0 < value < math.inf)
_DELTA = number("delta", "a number between 0 and 1", lambda value: 0 < value < 1, default=1e-5)

VECTOR_DEFENCES: Mapping[str, Kind] = {
    **{name: DEFENCES[name] for name in ("noise", "laplace", "int8", "fp8", "fp16", "bf16", "topk", "random")},
    "signs": Kind("signs", "one bit a number: its sign", lambda evidence, generator: keep_signs(evidence)),
    "cut": Kind(
        "cut:dimensions=128",
        "the first numbers of each vector alone, at length 1 again if renormalise",
        lambda evidence, generator, dimensions, renormalise: cut_dimensions(evidence, dimensions, renormalise),
        (whole_number("dimensions", 1), flag("renormalise", default=False)),
    ),
    "rotate": Kind(
        "rotate",
        "all vectors turned by one secret rotation; distances stay",
        lambda evidence, generator: rotate_secretly(evidence, generator),
    ),
    "private": Kind(
        "private:epsilon=8",
        "Gaussian noise that makes each vector of length 1 (epsilon, delta)-private",
        lambda evidence, generator, epsilon, delta: add_private_noise(evidence, epsilon, delta, generator),
        (_EPSILON, _DELTA),
    ),
}


class VectorDefence(Spec):
    """A defence of vectors with its settings: evidence in, evidence out."""

    noun: ClassVar[str] = "defence of vectors"
    table: ClassVar[Mapping[str, Kind]] = VECTOR_DEFENCES

    def __call__(self, evidence: VectorEvidence, generator: torch.Generator) -> VectorEvidence:
        """The vectors as the adversary sees them."""
        changed: VectorEvidence = self.kind.make(evidence, generator, **self.settings)
        return changed


def parse_vector_defence(text: str) -> VectorDefence:
    """The defence of vectors that a text names."""
    return VectorDefence.parse(text)
