"""Adam's steps as a noisy channel: what the sum of K steps tells of the gradients behind them, entry by entry.

    D = F(g_1 … g_K) + e,   F = Σ_k m̂_k/(√v̂_k + ε),   m̂_k, v̂_k the bias-corrected running means of g and of g²
    g_k = q₀(k)·(u_0 + p_1(k)·u_1 + … + p_{P−1}(k)·u_{P−1})

A gradient changes little from step to step, so few profiles over the steps describe it: p_i are orthonormal polynomials
in k. q₀ = 1; where the first gradient is zero (a LoRA factor A whose B starts at zero) q₀ = k − 1. To first order

    D ≈ sign(u_0)·(top − c·ε/|u_0| + Σ_i a_i·u_i/u_0)

so that |D| tells how u_0 compares with ε and with the drift u_i: entries that fall short of `top` are small ones.

    posterior of u   quadrature in u_0, ever closer around its posterior; the drift given u_0 is linearised (one more
                     Kalman update at the point found, and what the linearisation leaves of D joins its variance)

Notation: u (…, P) amplitudes of the profiles; e ~ N(0, σ²) the rounding of the weights over the learning rate.
Limits: two gradients or more; a fresh optimiser, known ε and β. With fewer profiles than gradients F is approximate.
Tails of the posterior are heavier than exact, and its variances may be some times too large.
Cost: about 40·K·P multiplications for each entry and quadrature node.
Source: Adam is Kingma, Ba 2014 (arXiv 1412.6980), Algorithm 1; the rest was measured for this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError

_AT_ONCE, _AT_ONCE_CUDA = 2**10, 2**16  # entries of which the posterior is computed at once: a cache, or a GPU
_REACH = 4.5  # standard deviations of the prior that the first quadrature covers
_CLOSER = 5.0  # standard deviations of the posterior that the next one covers
_TINY = 1e-60  # below every squared gradient: keeps the root of zero differentiable
_SAMPLE = 72  # rows that the scales of a column are guessed from


class AdamSteps:
    """F and its derivatives by the amplitudes of the profiles, and the numbers of its first order."""

    def __init__(
        self,
        num_steps: int,
        begins_at_zero: bool,
        most_profiles: int,
        epsilon: float,
        betas: tuple[float, float],
        device: torch.device | str = "cpu",
    ) -> None:
        numbers = torch.arange(1, num_steps + 1, dtype=torch.float64)
        skipped = int(begins_at_zero)  # a gradient of zero, and no step
        used = numbers[skipped:]
        if len(used) < 2:
            raise InputError(f"Adam's channel needs two gradients or more, got {len(used)} in {num_steps} steps")
        self.epsilon, self.num_profiles = epsilon, min(most_profiles, len(used))
        self.is_exact = self.num_profiles == len(used)
        ages = (numbers[:, None] - numbers).clamp_min(0)
        self._mean, self._square = (
            torch.tril((1 - beta) * beta**ages / (1 - beta**numbers)[:, None])[skipped:] for beta in betas
        )
        self.profiles = torch.zeros(self.num_profiles, num_steps, dtype=torch.float64)
        self.profiles[:, skipped:] = _polynomials(used, self.num_profiles)
        if begins_at_zero:
            self.profiles *= (numbers - 1) / (used - 1).mean()
        steady = torch.eye(self.num_profiles, dtype=torch.float64)[:1]
        (top, slopes), (less, _) = self._step(steady, 1e-30), self._step(steady, 1e-7)
        self.top, self.shortfall = float(top), float(top - less) / 1e-7
        self.drift = slopes[0, 1:].to(device)
        self.profiles, self._mean, self._square = (
            part.to(device) for part in (self.profiles, self._mean, self._square)
        )

    def __call__(self, u: Float[Tensor, "*n p"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n p"]]:
        """The sum of the steps, and its derivatives by the amplitudes."""
        return self._step(u, self.epsilon)

    def _step(self, u: Float[Tensor, "*n p"], epsilon: float) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n p"]]:
        gradients = u @ self.profiles
        root = (gradients.square() @ self._square.T).clamp_min(_TINY).sqrt()
        inverse = 1 / (root + epsilon)
        steps = (gradients @ self._mean.T) * inverse
        slopes = inverse @ self._mean - ((steps * inverse / root) @ self._square) * gradients
        return steps.sum(-1), slopes @ self.profiles.T


def _polynomials(numbers: Float[Tensor, " k"], count: int) -> Float[Tensor, "p k"]:
    """Orthonormal polynomials, times √k, positive at the end; the first is 1."""
    centred = numbers - numbers.mean()
    powers = torch.linalg.qr(torch.stack([centred**power for power in range(count)], 1)).Q * math.sqrt(len(numbers))
    return (powers * powers[-1].sign()).T


def posterior_moments(
    steps: AdamSteps,
    measured: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    mean: Float[Tensor, "n p"],
    covariance: Float[Tensor, "n p p"],
    nodes: Sequence[int],
) -> tuple[Float[Tensor, "n p"], Float[Tensor, "n p p"]]:
    """Mean and covariance of u given D, where u ~ N(mean, covariance); `nodes` of one quadrature after another."""
    at_once = _AT_ONCE if measured.device.type == "cpu" else _AT_ONCE_CUDA
    split = (part.split(at_once) for part in (measured, sigma, mean, covariance))
    parts = [_moments(steps, nodes, *some) for some in zip(*split, strict=True)]
    return torch.cat([means for means, _ in parts]), torch.cat([covariances for _, covariances in parts])


def _moments(
    steps: AdamSteps, nodes: Sequence[int], D: Tensor, sigma: Tensor, mean: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor]:
    """With T the prior's covariance, τ² = T_00, and T' that of the drift given u_0."""
    tau, lean = covariance[:, 0, 0].sqrt(), covariance[:, 1:, 0] / covariance[:, 0, 0, None]
    given_cov = covariance[:, 1:, 1:] - lean[:, :, None] * covariance[:, None, 0, 1:]
    low, high = mean[:, 0] - _REACH * tau, mean[:, 0] + _REACH * tau
    for turn, count in enumerate(nodes):
        gap = (high - low) / count
        u0 = low[:, None] + gap[:, None] * (torch.arange(count, dtype=D.dtype, device=D.device) + 0.5)
        given = mean[:, None, 1:] + lean[:, None] * (u0 - mean[:, :1])[..., None]
        drift, left, variance, reach = _update_drift(steps, D, sigma, u0, given, given_cov)
        prior = ((u0 - mean[:, :1]) / tau[:, None]).square()
        weights = (-0.5 * (left.square() / variance + variance.log() + prior)).softmax(1)
        mean0 = (weights * u0).sum(1)
        var0 = (weights * (u0 - mean0[:, None]).square()).sum(1)
        if turn + 1 < len(nodes):
            half = _CLOSER * (var0 + 0.3 * gap.square()).sqrt()
            low, high = torch.maximum(low, mean0 - half), torch.minimum(high, mean0 + half)
    drift_mean, found = (weights[..., None] * drift).sum(1), torch.empty_like(covariance)
    off = drift - drift_mean[:, None]
    spread = torch.einsum("nk,nkp,nkq->npq", weights, off, off)
    found[:, 0, 0] = var0 + gap.square() / 12
    found[:, 1:, 1:] = given_cov + spread - torch.einsum("nk,nkp,nkq->npq", weights / variance, reach, reach)
    found[:, 0, 1:] = found[:, 1:, 0] = torch.einsum("nk,nkp->np", weights * (u0 - mean0[:, None]), off)
    return torch.cat([mean0[:, None], drift_mean], 1), found


def _update_drift(
    steps: AdamSteps, D: Tensor, sigma: Tensor, u0: Tensor, given: Tensor, given_cov: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The drift given u_0 and D, the innovation of D, its variance, and its covariance with the drift."""
    drift, nonlinear = given, torch.zeros_like(u0)
    for again in (False, True):
        value, slopes = steps(torch.cat([u0[..., None], drift], -1))
        slopes = slopes[..., 1:]
        if again:
            nonlinear = (D[:, None] - value).square()
        reach = torch.einsum("npq,nkq->nkp", given_cov, slopes)
        variance = (reach * slopes).sum(-1) + sigma[:, None].square() + nonlinear
        left = D[:, None] - value - (slopes * (given - drift)).sum(-1)
        drift = given + reach * (left / variance)[..., None]
    return drift, left, variance, reach


def guess_scales(
    steps: AdamSteps,
    measured: Float[Tensor, "d m"],
    sigma: Float[Tensor, "d m"],
    sizes: Float[Tensor, " d"],
    layers: Sequence[slice],
) -> Float[Tensor, "m 3"]:
    """For each column the scale of u_0 over `sizes`, and mean and spread of Σ a_i·u_i over it, by first order.

    Columns of a layer are drawn to the layer's common scale. Cost: 700·26 for each sampled row and column.
    """
    d, num_columns = measured.shape
    rows = torch.arange(0, d, max(1, d // _SAMPLE), device=measured.device)
    z = torch.logspace(-2.2, 0.6, 26).to(measured)  # |u_0| over its scale
    prior = (-0.5 * z.square() + z.log()).log_softmax(0)
    found = torch.zeros(num_columns, 3).to(measured)
    for layer in layers:
        short = (steps.top - measured[:, layer].abs())[rows]
        typical = max(1e-9, float(short.abs().median()))
        by_epsilon = steps.shortfall * steps.epsilon
        scales = by_epsilon / (float(sizes.median()) * typical) * torch.logspace(-0.6, 2.4, 11).to(measured)
        spreads = typical * torch.logspace(-2, 0.3, 8).to(measured)
        means = typical * torch.tensor([-2.0, -1, -0.5, -0.2, 0, 0.2, 0.5, 1]).to(measured)
        drift, fits = (spreads[:, None, None] / z).square(), []
        for column, error in zip(short.T, sigma[rows, layer].T, strict=True):
            left = column[:, None] - by_epsilon / (scales[:, None, None] * sizes[rows, None] * z)
            variance = (drift + error.square()[:, None] + (0.15 * drift).square())[None, :, None]
            off = left[:, None, None] + means[:, None, None]
            fit = -0.5 * (off.square() / variance + variance.log()) + prior
            fits.append(fit.float().logsumexp(-1).clamp_min(-15).sum(-1).double())  # outliers count as 15
        total = torch.stack(fits)  # (columns, scales, spreads, means)
        scale, spread = divmod(int(total.logsumexp(3).sum(0).argmax()), len(spreads))
        away = (scales / scales[scale]).log().square()[:, None] / 0.98 + (
            spreads / spreads[spread]
        ).log().square() / 0.5
        best = (total - away[..., None]).flatten(1).argmax(1)
        found[layer] = torch.cartesian_prod(scales, spreads, means)[best][:, [0, 2, 1]]
    return found
