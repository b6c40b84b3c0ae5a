"""The spans that DAGER takes, and its two membership tests.

Notation: G (d, m) a gradient; b its rank; U (d, b) a basis of its column space. The distance of a row x is relative,
‖x − UUᵀx‖ / ‖x‖, computed in the precision of x and U, as the official code does.
Source: DAGER, arXiv 2405.15586, Theorems 5.1 and 5.2, and the authors' public code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.models.linear import LinearLayer, Role
from unmask.shapes import Basis, TokenBatch

_RANK_BLOCKS = 10  # the official code takes the largest rank of the first ten blocks for all of them
_POWER_ITERATIONS = 10  # of its randomised SVD


@dataclass(frozen=True)
class QuerySpans:
    """Bases of blocks 0 and 1, block 1's gradient, and the rank b before the paper's cut b̃ = min(b, d − margin)."""

    first: Basis
    second: Basis
    second_gradient: Float[Tensor, "d m"]
    rank: int

    @property
    def is_cut(self) -> bool:
        """Whether the spans were cut below the rank, so that rows of the batch may not lie in them."""
        return self.rank > self.second.shape[1]


@dataclass(frozen=True)
class SequenceCheck:
    """Rows that enter block 1, computed afresh for every sequence, against block 1's span."""

    model: Model
    basis: Basis
    num_unchecked: int  # leading rows whose query gradient is zero

    def rows(self, sequences: TokenBatch) -> Float[Tensor, "batch length d"]:
        """Attention inputs of block 1 by a full forward pass through block 0."""
        states = self.model.hidden_states(sequences.to(self.model.device), num_blocks=1)[-1]
        return self.model.attention_input(1, states)

    def distances(self, sequences: TokenBatch) -> Float[Tensor, "batch checked"]:
        """Distances of all rows that are checked."""
        return span_distance(self.rows(sequences)[:, self.num_unchecked :], self.basis)


def span_distance(rows: Float[Tensor, "*n d"], basis: Basis) -> Float[Tensor, "*n"]:
    """‖x − UUᵀx‖ of rows scaled to norm 1. Theorem 5.2: almost surely zero for rows of the batch only."""
    unit = (rows / rows.norm(dim=-1, keepdim=True)).to(basis.dtype)
    return (unit - (unit @ basis) @ basis.T).norm(dim=-1)


def query_layers(evidence: GradientEvidence, model: Model) -> list[LinearLayer | None]:
    """The layers that DAGER reads in the first blocks; None where the update does not hold one.

    A parameter that queries share with keys and values is read whole, as the official code does.
    """
    layers = [model.linear(Role.QUERY, block) for block in range(min(model.num_blocks, _RANK_BLOCKS))]
    held = [layer if layer and layer.parameter in evidence.gradients else None for layer in layers]
    return held + [None] * (2 - len(held))


def take_spans(
    evidence: GradientEvidence,
    layers: Sequence[LinearLayer],
    *,
    rank_margin: int,
    rank_tolerance: float | None,
    seed: int,
) -> QuerySpans:
    """Column spaces of the first two layers' gradients, both at the largest rank of all, at most d − `rank_margin`.

    Theorem 5.1: G = Xᵀ·∂L/∂Y; if ∂L/∂Y has rank b, the number of distinct rows of X, the columns of G span them.
    Cost: singular values of every gradient, and two randomised SVDs.
    """
    gradients = [_whole_gradient(evidence, layer) for layer in layers]
    rank = _largest_rank([_spectrum(gradient) for gradient in gradients], rank_tolerance)
    kept = cut(rank, gradients[0].shape[0], rank_margin)
    first, second = (_basis(gradient, kept, seed) for gradient in gradients[:2])
    return QuerySpans(first, second, gradients[1], rank)


def take_ranks(
    evidence: GradientEvidence, layers: Sequence[LinearLayer], rank_tolerances: Sequence[float | None]
) -> list[int]:
    """The rank that `take_spans` would see at each tolerance; the singular values are computed once."""
    spectra = [_spectrum(_whole_gradient(evidence, layer)) for layer in layers]
    return [_largest_rank(spectra, tolerance) for tolerance in rank_tolerances]


def cut(rank: int, width: int, rank_margin: int) -> int:
    """The paper's b̃ = min(b, d − margin), at least 1: what is kept of a gradient that fills the width."""
    return max(1, min(rank, width - rank_margin))


def _whole_gradient(evidence: GradientEvidence, layer: LinearLayer) -> Float[Tensor, "d m"]:
    """The gradient of all that is stored under a layer's parameter; of a client in half precision in float32."""
    stored = replace(layer, columns=None).orient(evidence.gradients[layer.parameter])
    return stored if evidence.compute_dtype is torch.float64 else stored.float()


@dataclass(frozen=True)
class _Spectrum:
    """Singular values of a gradient, and what NumPy's matrix_rank takes for zero in it: σ₁·max(d, m)·ε."""

    values: Float[Tensor, " k"]
    rounding: float


def _spectrum(gradient: Float[Tensor, "d m"]) -> _Spectrum:
    values = torch.linalg.svdvals(gradient.T)  # LAPACK takes nine times as long for the wide (768, 2304)
    return _Spectrum(values, float(values[0]) * max(gradient.shape) * torch.finfo(gradient.dtype).eps)


def _largest_rank(spectra: Sequence[_Spectrum], tolerance: float | None) -> int:
    """The largest number of singular values above the tolerance; None: above rounding, as in NumPy."""
    return max(int((one.values > (one.rounding if tolerance is None else tolerance)).sum()) for one in spectra)


def _basis(gradient: Float[Tensor, "d m"], rank: int, seed: int) -> Basis:
    """The first left singular vectors of G, by the official code's randomised SVD, from a seed."""
    devices = [gradient.device] if gradient.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        _, _, right = torch.svd_lowrank(gradient.T, q=rank, niter=_POWER_ITERATIONS)
    return right
