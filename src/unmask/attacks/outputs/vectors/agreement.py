"""Whether a candidate's vector is the one that was stored: what storage and rounding leave unexplained of it.

    excess(c) = ‖max(|c − t| − half steps, 0)‖ / ‖t‖  ≤  tolerance         numbers that were rounded, or not at all
    excess(c) = share of the parts of c whose code differs  = 0             product codes, signs

A vector that was stored coarsely tells fewer texts apart. Its numbers hold about Σ log2(size / step) bits; they are
correlated, so that half of it is counted, and a text of n tokens needs n·log2 V of them and some more.

Notation: t the vector stored, c that of a candidate, V the vocabulary.
Limits: added noise is no rounding: no text agrees with it.
Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.evidence.vectors import VectorEvidence
from unmask.linalg.coarse import Coarseness, decimal_step, storage_of
from unmask.linalg.product_codes import differing_parts, product_codes
from unmask.models.adapter import Model
from unmask.proof.state_noise import stored_spacing

_ROUNDING = 1e-5  # of a vector's length: float32 is off by 1e-6
_MORE = 1.8  # times the largest error of a sample
_SAMPLE = (16, 12)  # random texts that the error of another precision is measured on
_DECIMALS = range(1, 8)  # of numbers that were written as text; float32 shows more of them
_SPARE_BITS = 40.0  # beyond those of all texts of a length: one false text in 10¹²


@dataclass(frozen=True)
class StoredVector:
    """One vector of the evidence, and how exactly it is known."""

    vector: Float[Tensor, " d"]  # float64
    half_steps: Float[Tensor, " d"]
    tolerance: float
    bits: float
    centroids: Float[Tensor, "m codes k"] | None = None
    offset: Float[Tensor, " d"] | None = None

    def excess(self, vectors: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        """What is unexplained of candidates' vectors; at most `tolerance` where they agree."""
        found = vectors.to(self.vector)
        if self.centroids is None:
            off = ((found - self.vector).abs() - self.half_steps).clamp_min(0).norm(dim=1)
            return off / self.vector.norm().clamp_min(torch.finfo(off.dtype).tiny)
        centroids = self.centroids.to(found)
        code = product_codes(self.vector[None] - self._offset, centroids)
        return differing_parts(found - self._offset, code, centroids)

    @property
    def _offset(self) -> Tensor:
        return torch.zeros_like(self.vector) if self.offset is None else self.offset.to(self.vector)

    def agrees(self, vectors: Float[Tensor, "k d"]) -> Tensor:
        """Which candidates' vectors are the stored one."""
        return self.excess(vectors) <= self.tolerance

    def tells_apart(self, num_tokens: int, vocab_size: int) -> bool:
        """Whether so many bits tell texts of some length apart."""
        return self.bits >= num_tokens * math.log2(vocab_size) + _SPARE_BITS


def stored_vectors(evidence: VectorEvidence, computing_error: float) -> list[StoredVector]:
    """Every vector of the evidence."""
    vectors = evidence.vectors.double()
    tolerance = _ROUNDING + _MORE * computing_error
    found = []
    for number, vector in enumerate(vectors):
        offset = None if evidence.offsets is None else evidence.offsets[number]
        if evidence.quantiser is not None:
            parts, codes, _ = evidence.quantiser.shape
            bits = parts * math.log2(codes) / 2
            found.append(StoredVector(vector, torch.zeros_like(vector), 0.0, bits, evidence.quantiser, offset))
            continue
        steps = _half_steps(evidence.vectors[number]) if evidence.half_steps is None else evidence.half_steps[number]
        steps = steps.to(vector)
        found.append(StoredVector(vector, steps, tolerance, _count_bits(vector, steps, tolerance)))
    return found


def _half_steps(vector: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """How far each number may be off, as the values show; of numbers that are missing nothing is known."""
    if storage_of(vector).kind is Coarseness.THINNED:
        return torch.where(vector == 0, torch.inf, 0.0)
    spacing = stored_spacing(vector)
    if spacing is not None:
        return spacing / 2
    written = decimal_step(vector, _DECIMALS) if bool(vector.any()) else None
    return torch.full_like(vector, (written or 0.0) / 2)


def _count_bits(vector: Float[Tensor, " d"], half_steps: Float[Tensor, " d"], tolerance: float) -> float:
    size = vector.norm() / math.sqrt(len(vector))
    steps = 2 * (half_steps + tolerance * size)
    return float((size / steps.clamp_min(1e-30)).log2().clamp_min(0).sum()) / 2


@torch.no_grad()
def measure_computing_error(embedder: Embedder, model: Model, dtype: torch.dtype) -> float:
    """How far vectors are off where the service computes in `dtype`: the largest relative error of a sample."""
    if dtype in (torch.float32, torch.float64):
        return 0.0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, _SAMPLE, generator=generator).to(model.device)
    framed = embedder.recipe.frame(model, tokens)
    fine = embedder.recipe.embed(model, framed).double()
    coarse = embedder.recipe.embed(model.to(dtype=dtype), framed).double()
    return float(((coarse - fine).norm(dim=1) / fine.norm(dim=1)).max())
