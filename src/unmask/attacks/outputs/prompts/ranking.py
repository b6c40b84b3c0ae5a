"""Which token is it? Candidates in order of their probability, given a state, a table of templates and a prior.

Near a stream x₀ in the middle, the state is h(x) ≈ h(x₀) + J (x − x₀), and the stream of token v is N(T[v] + s, Σ), so
the state of token v is normal too:

    h | v ~ N( h(x₀) + J (T[v] + s − x₀),  J Σ Jᵀ + τ²I ),    τ² = noise² + (c·‖h − h(x₀)‖)²/d

The last term stands for what a linear map leaves out. Directions in which J says nothing count for nothing by
themselves; to invert J and to look for the nearest template would be led astray by exactly those.

    score(v) = −½·κ·(h − mean_v)ᵀ cov⁻¹ (h − mean_v) + log p(v)

Notation: T[v] = φ(v)·A + b, the expected stream of token v (templates.py), s this context's shift; J = ∂h/∂x at x₀;
κ < 1 because coordinates are not as independent as the covariance says.
Limits: an order, not a proof. Without linearisation (the table of the layer seen): J = I, x₀ = 0.
Cost: 2·V·d·r flops a ranking, and r rows of a Jacobian: all d, or d/4 in leading directions of h.
Source: an extended Kalman filter's update, with a discrete unknown. c = 0.3 and κ = 0.2 were chosen by experiment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.prompts.templates import TokenStates

_TEMPER = 0.2
_LEFT_OUT = 0.3
_RIDGE = 1e-6
_WIDE = 256  # fewer entries of a state are all used
_LEADING_SHARE = 4
_SAMPLED = 4096  # tokens that the directions are measured on


@dataclass(frozen=True)
class LocalMap:
    """h(x) ≈ state + jacobian·(x − point), of all entries of h or of some directions of it."""

    point: Float[Tensor, " d"]
    state: Float[Tensor, " m"]
    jacobian: Float[Tensor, "m d"]


@dataclass(frozen=True)
class Metric:
    """A whitening of the state's coordinates, and the table of templates seen through it."""

    whiten: Float[Tensor, "d d"]  # L⁻¹·J
    rows: Float[Tensor, "vocab d"]  # T[v]·whitenᵀ, shifted
    squares: Float[Tensor, " vocab"]  # half of their squared norms

    def scores(self, whitened: Float[Tensor, "n d"]) -> Float[Tensor, "n vocab"]:
        """−½‖whitened − row‖² of every token, up to a constant."""
        return whitened @ self.rows.T - self.squares

    def score_rows(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n vocab"]:
        """The same of rows that are not whitened yet."""
        return self.scores(rows @ self.whiten.T)


def direct_metric(table: TokenStates, ridge: float = 0.1) -> Metric:
    """The metric of the layer's own table; `ridge` in units of the median variance."""
    variances, directions = torch.linalg.eigh(table.covariance.double())
    floor = ridge * variances.median().clamp_min(_RIDGE)
    whiten = (directions / (variances.clamp_min(0) + floor).sqrt()).T.to(table.shift)
    return _metric(table, whiten, torch.zeros_like(table.shift))


def leading_directions(metric: Metric) -> Float[Tensor, "r d"] | None:
    """Directions of states in which tokens differ most, in units of how far contexts move them; None for few entries.

    They are the leading discriminants (Fisher): principal directions of the whitened table, as orthonormal rows. A
    quarter of them ranks nearly as well as all, and a Jacobian of them costs a quarter.
    """
    width = metric.whiten.shape[1]
    if width < _WIDE:
        return None
    sample = metric.rows[:: max(1, len(metric.rows) // _SAMPLED)].double()
    _, directions = torch.linalg.eigh(torch.cov(sample.T))
    leading = directions[:, -(width // _LEADING_SHARE) :].T @ metric.whiten.double()
    return torch.linalg.qr(leading.T).Q.T.to(metric.whiten)


def linearised_scores(
    table: TokenStates,
    shift: Float[Tensor, " d"],
    state: Float[Tensor, " m"],
    near: LocalMap,
    noise_variance: float,
) -> Float[Tensor, " vocab"]:
    """Scores of all tokens through a linear map that is good near one point."""
    J = near.jacobian.double()
    residual = (state - near.state).double()
    width = len(state)
    left_out = (_LEFT_OUT * float(residual.norm())) ** 2 / width
    covariance = J @ table.covariance.double() @ J.T
    covariance = (covariance + covariance.T) / 2
    scale = float(covariance.diagonal().mean())
    covariance.diagonal().add_(noise_variance + left_out + _RIDGE * scale + torch.finfo(torch.float64).tiny)
    lower = torch.linalg.cholesky(covariance)
    whiten = torch.linalg.solve_triangular(lower, J, upper=False)
    seen = torch.linalg.solve_triangular(lower, (residual + J @ near.point.double())[:, None], upper=False)
    metric = _metric(table, whiten.to(state), shift)
    return metric.scores(seen.to(state).T)[0]


def posterior(scores: Float[Tensor, "*n vocab"], prior: Float[Tensor, "*n vocab"]) -> Float[Tensor, "*n vocab"]:
    """Tempered likelihood and prior, in logarithms."""
    return _TEMPER * scores + prior


def _metric(table: TokenStates, whiten: Float[Tensor, "d d"], shift: Float[Tensor, " d"]) -> Metric:
    rows = table.features @ (table.slope @ whiten.T) + (table.shift + shift) @ whiten.T
    return Metric(whiten, rows, rows.square().sum(1) / 2)
