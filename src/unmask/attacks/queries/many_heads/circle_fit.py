"""The heads that a circle of first tokens shows, from values on it: poles beside the circle, then least squares."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unmask.linalg.least_squares import Equations, Polished, polish_equations
from unmask.linalg.poles import rational_poles

# Of the noise: where the rational approximation stops. The first is for values that are exact, the others for noise,
# of which a closer approximation would make poles.
_TOLERANCES = (4.0, 30.0, 200.0)
_EXPLAINED = 2.0  # standard deviations of what heads may leave
_DEGREE = 3  # values for each pole
_LEAST_HEIGHT, _MOST_HEIGHT = 0.01, 3.0  # of a pole above the circle; A = π/sinh: from 314 down to 0.3
_LADDER = (3, 5, 7)  # a head's further poles are so many times as high as its first
_SAME_PLACE, _SAME_STEP = 0.3, 0.25
_MOST_HEADS = 24
_PATIENCE = 4  # further poles that may fail to make the fit better
_PROMISING = 0.05  # of the largest value: what a linear fit of good poles leaves
_BETTER = 0.7  # of what was left before
_NUM_STEPS = 30
_NUM_DROPS = 3  # heads that are tried to be left out, the least missed first


class CircleHeads(NamedTuple):
    """Heads on a circle; `deviation` is what they leave, for a value. Rows of `heads`: p, q, α, β."""

    heads: Float[Tensor, "4 h"]
    deviation: float
    condition: float  # the largest error of p and q for errors of one in every value


def fit_circle(
    angle: Float[Tensor, " n"], values: Float[Tensor, " n"], noise: float, max_heads: int = _MOST_HEADS
) -> CircleHeads | None:
    """The fewest heads that explain the values of half a circle; None where none do.

        G(θ) = ½ Σ_h (α_h cos θ + β_h sin θ)·tanh((p_h cos θ + q_h sin θ)/2),    θ in [0, π), G(θ + π) = G(θ)

    In ζ = e^{2iθ} this is meromorphic off the origin. With p cos θ + q sin θ = A·sin(x₀ − θ) a head has poles at
    θ = x₀ ± i·y, sinh y = (2k + 1)·π/A. So a pole gives (p, q) = π/sinh y·(−sin x₀, cos x₀); α and β follow
    linearly, and all are polished together.

    Notation: `angle` evenly spaced; `noise` the standard deviation of a value. (p, q, α, β) and their negative are
    the same head.
    Limits: A up to about 300. Heads whose (p, q) are equal or opposite are one.
    Cost: some SVDs of (n, n/3), and Levenberg–Marquardt with 4H unknowns, some H times.
    Source: ours; poles by AAA (`rational_poles`).
    """
    best: CircleHeads | None = None
    for factor in _TOLERANCES:
        p, q = _first_poles(angle, values, factor * noise)
        most = min(len(p), max_heads, (len(angle) - 1) // 4)
        if most == 0:
            continue
        found = _thin(angle, values, _grow(angle, values, p[:most], q[:most], noise), noise)
        if best is None or found.deviation < best.deviation:
            best = found
        if best.deviation <= _EXPLAINED * noise:
            return best
    return None


def _first_poles(
    angle: Float[Tensor, " n"], values: Float[Tensor, " n"], tolerance: float
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """p and q of every pole that is not a further one of a head, those next to the circle first."""
    zeta = np.exp(2j * angle.cpu().numpy())
    poles = rational_poles(zeta, values.cpu().numpy(), tolerance, len(angle) // _DEGREE)
    poles = poles[(np.abs(poles) < 1) & (np.abs(poles) > np.exp(-2 * _MOST_HEIGHT))]
    place, height = np.angle(poles) / 2, np.maximum(-np.log(np.abs(poles)) / 2, _LEAST_HEIGHT)
    order = np.argsort(height)
    place, height = place[order], height[order]
    size = np.pi / np.sinh(height)
    kept = list[int]()
    for i in range(len(place)):
        if not any(
            abs(np.sin(place[i] - place[j])) < _SAME_PLACE * height[j]
            and any(abs(size[j] / size[i] - k) < _SAME_STEP * k for k in _LADDER)
            for j in kept
        ):
            kept.append(i)
    x0, A = torch.from_numpy(place[kept]).to(values), torch.from_numpy(size[kept]).to(values)
    return -A * x0.sin(), A * x0.cos()


def _grow(angle: Tensor, values: Tensor, p: Tensor, q: Tensor, noise: float) -> Polished:
    """The fit with as many of the poles as explain the values; of fits that do not, the best."""
    best: Polished | None = None
    patience = _PATIENCE
    for num in range(1, len(p) + 1):
        start, left = _heights(angle, values, p[:num], q[:num])
        if left > _PROMISING * float(values.abs().max()) and num < len(p):
            continue
        fit = polish_equations(_equations(angle, values, num), start, max_steps=_NUM_STEPS)
        is_better = best is None or fit.deviation < _BETTER * best.deviation
        best, patience = (fit, _PATIENCE) if is_better else (best, patience - 1)
        if fit.deviation <= _EXPLAINED * noise or patience == 0:
            break
    assert best is not None
    return best


def _thin(angle: Tensor, values: Tensor, whole: Polished, noise: float) -> CircleHeads:
    """Leave out heads that are not missed, one by one."""
    while len(whole.x) > 4:
        heads = whole.x.reshape(4, -1)
        num = heads.shape[1]
        rest = [torch.arange(num, device=values.device) != k for k in range(num)]
        starts = sorted((_heights(angle, values, heads[0, keep], heads[1, keep]) for keep in rest), key=lambda s: s[1])
        allowed = max(_EXPLAINED * noise, 1.02 * whole.deviation)
        for start, _ in starts[:_NUM_DROPS]:
            less = polish_equations(_equations(angle, values, num - 1), start, max_steps=_NUM_STEPS)
            if less.deviation <= allowed:
                whole = less
                break
        else:
            break
    num = len(whole.x) // 4
    spread = torch.linalg.pinv(whole.J, rtol=1e-15)[: 2 * num].norm(dim=1)
    return CircleHeads(whole.x.reshape(4, num), whole.deviation, float(spread.max()))


def _heights(angle: Tensor, values: Tensor, p: Tensor, q: Tensor) -> tuple[Float[Tensor, " x"], float]:
    """The unknowns with the best α and β for these p and q, and the rms of what they leave."""
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    share = 0.5 * torch.tanh((p * cos + q * sin) / 2)
    rows = torch.cat([share * cos, share * sin], dim=1)
    heights = torch.linalg.lstsq(rows, values[:, None], rcond=1e-13, driver="gelsd").solution[:, 0]
    left = float((rows @ heights - values).square().mean().sqrt())
    return torch.cat([p, q, heights]), left


def _equations(angle: Float[Tensor, " n"], values: Float[Tensor, " n"], num: int) -> Equations:
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def equations(x: Float[Tensor, " x"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n x"]]:
        p, q, alpha, beta = x.reshape(4, num)
        share = 0.5 * torch.tanh((p * cos + q * sin) / 2)
        height = alpha * cos + beta * sin
        slope = height * (0.25 - share.square())
        J = torch.cat([slope * cos, slope * sin, share * cos, share * sin], dim=1)
        return (height * share).sum(1) - values, J

    return equations
