"""Is what is left between a candidate's state and the one seen mere noise, or another token?

Noise that was added to a state is the same in all directions. The difference of two tokens' states is not: it lies
where tokens differ, J (C + Σ) Jᵀ, whose quieter half of directions holds little of it. So the quiet half measures the
noise, whichever token was tested, and a residual that is no longer than that noise in all directions has no token's
difference in it:

    ν = mean of the squared quiet coordinates of r,    ‖r‖² ≤ (1 + slack)·d·ν   ⇔   r is white

Notation: r = h − h(v); C the covariance between tokens' templates, Σ around them; J the map to the state;
excess = ‖r‖²/(d·ν), 1 for white noise.
Limits: only as good as the quiet half is quiet: differences of tokens in random, isotropic weights look white. Noise
that is shaped like the differences of tokens is taken for one.
Cost: an eigendecomposition, d³.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_SLACK = 0.3  # the quiet half of 576 coordinates tells the variance to 6 %, four times over 24 %


@dataclass(frozen=True)
class Whiteness:
    """The variance of a coordinate's noise, and the residual's mean square by it (1: white)."""

    noise_variance: float
    excess: float

    @property
    def is_white(self) -> bool:
        """Whether the residual is explained by noise alone."""
        return self.excess <= 1 + _SLACK


@dataclass(frozen=True)
class WhitenessTest:
    """Directions in which states of two tokens differ, the quiet ones first."""

    directions: Float[Tensor, "d d"]

    @classmethod
    def of(cls, jacobian: Float[Tensor, "d d"], spread: Float[Tensor, "d d"]) -> WhitenessTest:
        """The test behind a linear map of tokens' streams."""
        J = jacobian.double()
        return cls(torch.linalg.eigh(J @ spread.double() @ J.T)[1])  # ascending

    def __call__(self, residual: Float[Tensor, " d"]) -> Whiteness:
        """Measure the noise in the quiet directions and compare it with all of the residual."""
        squares = (residual.double() @ self.directions).square()
        quiet = float(squares[: len(squares) // 2].mean())
        return Whiteness(quiet, float(squares.mean()) / quiet if quiet > 0 else float("inf"))
