"""How far a vector is from the span of a noisy matrix, against what noise leaves of a vector that lies in it.

M = S + E with noise E of variance 1. The left singular vectors of M above the noise span the columns of S only nearly:
a unit vector x of that span has, outside of them,

    E‖P⊥x‖² ≈ (d − r) · Σ_i (u_i·x)² / (s_i² − m)

so the excess is log(‖P⊥x‖² / that), zero for a vector of the span and several units for any other.

Notation: M (d, m); r directions u_i above the noise, with singular values s_i.
Limits: directions of S below the noise are lost, and what a vector has of them looks like distance.
Source: first-order perturbation of singular vectors; Benaych-Georges, Nadakuditi, arXiv 1103.2221 (s² − m is S's own).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.noise import noise_in, square
from unmask.linalg.subspace import Span
from unmask.linalg.whitening import WhitenedGradients
from unmask.shapes import Basis

_LEAST_ROOM = 8  # directions that must be free, or nothing can be told
_LEAST_SIGNAL = 0.05  # of m: a direction just above the noise has at least this much of its own
_ROUNDING = 1e-5  # of the squared length: what float32 leaves of a row
_MOST = 20.0  # more excess than this says no more


@dataclass(frozen=True)
class NoisySpan:
    """Directions of a whitened gradient above its noise."""

    basis: Basis
    weights: Float[Tensor, " r"]  # (d − r) / (s² − m)
    row_scale: Float[Tensor, " d"]

    @classmethod
    def of(cls, white: WhitenedGradients, dtype: torch.dtype = torch.float32) -> NoisySpan:
        """The span of a gradient whose noise was made white."""
        d, m = white.matrix.shape
        left, values, _ = torch.linalg.svd(square(white.matrix), full_matrices=False)
        rank = max(0, min(noise_in(values, max(d, m)).rank, d - _LEAST_ROOM))
        own = (values[:rank].square() - m).clamp_min(_LEAST_SIGNAL * m)
        return cls(left[:, :rank].to(dtype), ((d - rank) / own).to(dtype), white.row_scale.to(dtype))

    def to(self, dtype: torch.dtype) -> NoisySpan:
        """The same span in another precision; float32 leaves an error of 1e-6 of a row's squared length."""
        return NoisySpan(self.basis.to(dtype), self.weights.to(dtype), self.row_scale.to(dtype))

    @property
    def rank(self) -> int:
        """The number of directions above the noise."""
        return self.basis.shape[1]

    def as_span(self) -> Span:
        """The same directions without what noise leaves of a row; singular values are those of S."""
        d, rank = self.basis.shape
        return Span(self.basis, ((d - rank) / self.weights).sqrt(), d, 0.0, 0.0, self.row_scale)

    def excess(self, rows: Float[Tensor, "... d"]) -> Float[Tensor, "..."]:
        """log of the squared distance over what noise leaves, from 0 to 20."""
        outside, expected = self.squares(rows)
        return (outside / (expected + _ROUNDING)).clamp(1, torch.e**_MOST).log()

    def squares(self, rows: Float[Tensor, "... d"]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """‖P⊥x‖² of rows, scaled to length 1, and what noise leaves of a row of the span."""
        scaled = rows.to(self.basis) * self.row_scale
        shares = (torch.nn.functional.normalize(scaled, dim=-1) @ self.basis).square()
        return (1 - shares.sum(-1)).clamp_min(0), shares @ self.weights
