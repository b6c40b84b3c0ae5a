"""Is what is left between a candidate's state and the one seen mere noise, another token, or another model?

Noise that was added to a state is the same in all directions. The difference of two tokens' states is not: it lies
where tokens differ, J (C + Σ) Jᵀ, whose quieter half of directions holds little of it. So the quiet half measures the
noise, whichever token was tested, and a residual that is no longer than that noise in all directions has no token's
difference in it:

    ν = mean of the squared quiet coordinates of r,    ‖r‖² ≤ (1 + slack)·d·ν   ⇔   r is white

What another position, layer or model leaves may be *shorter* in the loud directions, so that it passes; but it is not
the same in all of them. The directions are cut into bands, from the quiet to the loud ones, and the bands' variances
are compared by Bartlett's test:

    T = (d·log ν̄ − Σ_b n_b·log ν_b)/c  ~  χ²,    r is even  ⇔  P(χ² ≥ T) ≥ 10⁻⁸

Nor is it noise if a part of the state (a head's keys, its values) has next to none: values that agree beside keys that
don't are those of another position. Nor is what lies in few entries: these were left out.

Notation: r = h − h(v); C the covariance between tokens' templates, Σ around them; J the map to the state;
excess = ‖r‖²/(d·ν), 1 for white noise; n_b entries and ν_b mean square of a band, ν̄ of all of r; c ≈ 1.
Limits: only as good as the quiet half is quiet: differences of tokens in random, isotropic weights look white. Noise
that is shaped like the differences of tokens is taken for one. The rate of 10⁻⁸ a position is that of Gaussian noise.
Cost: an eigendecomposition, d³.
Source: M. S. Bartlett, Properties of sufficiency and statistical tests, 1937, for T and c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_SLACK = 0.3  # the quiet half of 576 coordinates tells the variance to 6 %, four times over 24 %
_FALSE_ALARM = 1e-8  # of Gaussian noise, a position
_BAND = 8  # entries of a band at least
_MOST_BANDS = 8
_SPIKY = 12.0  # mean fourth power by the square of the mean square: 3 of Gaussian noise, 6 of Laplace's
_SILENT = 0.01  # of the mean square: 16 entries of Gaussian noise have so little in one of 10¹³ cases


@dataclass(frozen=True)
class Whiteness:
    """The variance of a coordinate's noise, the residual's mean square by it (1: white), and how even it is."""

    noise_variance: float
    excess: float
    evenness: float = 1.0  # how often Gaussian noise is as uneven

    @property
    def is_white(self) -> bool:
        """Whether the residual is no longer in the directions of tokens than in the others."""
        return self.excess <= 1 + _SLACK

    @property
    def is_even(self) -> bool:
        """Whether it is the same in all directions; if not, it is no noise that was added."""
        return self.evenness >= _FALSE_ALARM


@dataclass(frozen=True)
class WhitenessTest:
    """Directions in which states of two tokens differ, the quiet ones first."""

    directions: Float[Tensor, "d d"]

    @classmethod
    def of(cls, jacobian: Float[Tensor, "d d"], spread: Float[Tensor, "d d"]) -> WhitenessTest:
        """The test behind a linear map of tokens' streams."""
        J = jacobian.double()
        return cls(torch.linalg.eigh(J @ spread.double() @ J.T)[1])  # ascending

    def __call__(self, residual: Float[Tensor, " d"], widths: Sequence[int] = ()) -> Whiteness:
        """Measure the noise in the quiet directions and compare it with all of the residual; parts are of `widths`."""
        squares = (residual.double() @ self.directions).square()
        quiet = float(squares[: len(squares) // 2].mean())
        excess = float(squares.mean()) / quiet if quiet > 0 else float("inf")
        is_other = _has_silent_part(residual.double(), widths) or _has_spikes(residual.double())
        return Whiteness(quiet, excess, 0.0 if is_other else _evenness(squares))


def _has_silent_part(residual: Float[Tensor, " d"], widths: Sequence[int]) -> bool:
    """Whether a part of enough entries is right although the others are not."""
    least = _SILENT * float(residual.square().mean())
    parts = residual.split(list(widths)) if widths else (residual,)
    return any(float(part.square().mean()) < least for part in parts if len(part) >= 2 * _BAND)


def _has_spikes(residual: Float[Tensor, " d"]) -> bool:
    """Whether few entries hold most of it, as where entries were left out."""
    square = float(residual.square().mean())
    return square > 0 and float(residual.pow(4).mean()) > _SPIKY * square**2


def _evenness(squares: Float[Tensor, " d"]) -> float:
    """How often Gaussian noise has variances of bands that differ as much (Bartlett)."""
    number = min(_MOST_BANDS, len(squares) // _BAND)
    if number < 2 or not float(squares.sum()) > 0:
        return 1.0
    bands = squares.tensor_split(number)
    sizes = squares.new_tensor([len(band) for band in bands])
    variances = torch.stack([band.mean() for band in bands]).clamp_min(1e-300)
    statistic = len(squares) * squares.mean().log() - (sizes * variances.log()).sum()
    correction = 1 + ((1 / sizes).sum() - 1 / len(squares)) / (3 * (number - 1))
    freedom = squares.new_tensor(number - 1.0)
    return float(torch.special.gammaincc(freedom / 2, (statistic / correction / 2).clamp_min(0)))
