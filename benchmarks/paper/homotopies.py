"""Homotopies for indefinite layers without any prior: curves to pre-images, tried beside the search that is in use.

    shift     Φ(X; W + (1 − τ)cI) = Y          from a definite layer, c = 1 − λ_min(sym W)
    dilation  (softmax(τS)X − X̄)/τ + X̄ = Y     from the first order, which has one solution for every regular W

Both curves are followed by their length through folds (pseudo-arclength), as `solvers/homotopy.py` does. Each time that
τ passes 1, the point is polished and kept.

Notation: S = X W Xᵀ, X̄ the mean of the rows; ds the arclength of a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.attacks.outputs.layer_inputs.known_norms import polish
from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem
from unmask.linalg.first_order_attention import invert_first_order
from unmask.solvers.iterate import Ending, iterate
from unmask.solvers.trust_region import Dogleg

_TOLERANCE = 1e-12
_FARTHEST = 1e4  # times the start's norm
_TAU = 1e-5  # step of the difference quotient in τ


@dataclass(frozen=True)
class Shift:
    """The identity is added to W, until it is definite."""

    problem: AttentionProblem

    def start(self) -> Tensor | None:
        """The pre-image of the definite layer that its own output leads to."""
        problem = self.at(0.0)
        tolerance = _TOLERANCE * float(problem.Y.norm())
        outcome = iterate(Dogleg(tolerance), problem, problem.Y.reshape(-1), max_steps=60)
        return outcome.state.x if outcome.ending is Ending.CONVERGED else None

    def at(self, tau: float) -> AttentionProblem:
        """The layer at τ."""
        c = 1 - self.problem.least_eigenvalue
        return replace(self.problem, W=self.problem.W + (1 - tau) * c * torch.eye(len(self.problem.W)).double())

    def value(self, x: Tensor, tau: float) -> Tensor:
        """H."""
        return self.at(tau).residuals(x[None])[0]

    def jacobian(self, x: Tensor, tau: float) -> Tensor:
        """∂H/∂x."""
        return self.at(tau).jacobian(x)


@dataclass(frozen=True)
class Dilation:
    """What attention does to first order is kept, the rest grows with τ."""

    problem: AttentionProblem

    def start(self) -> Tensor | None:
        """The one solution of the first order."""
        x = invert_first_order(self.problem.W, self.problem.Y, num_steps=100).reshape(-1)
        return x if bool(x.isfinite().all()) else None

    def value(self, x: Tensor, tau: float) -> Tensor:
        """q·X + X̄ − Y with q = (softmax(τS) − 1/n)/τ, also at τ = 0."""
        X = x.reshape(self.problem.Y.shape)
        return (self._moved(X, tau) @ X + X.mean(0) - self.problem.Y).reshape(-1)

    def jacobian(self, x: Tensor, tau: float) -> Tensor:
        """(q + 1/n) ⊗ I and the terms of attention with weights 1/n + τq."""
        X, W = x.reshape(self.problem.Y.shape), self.problem.W
        n = len(X)
        moved = self._moved(X, tau)
        weights = 1 / n + tau * moved
        offsets = weights[:, :, None] * (X[None] - (weights @ X)[:, None])
        J = torch.einsum("ima,ib->iamb", offsets, X @ W)
        J.diagonal(dim1=1, dim2=3).add_((moved + 1 / n)[:, :, None])
        token = torch.arange(n)
        J[token, :, token, :] += offsets.mT @ (X @ W.mT)
        return J.reshape(len(x), len(x))

    def _moved(self, X: Tensor, tau: float) -> Tensor:
        S = X @ self.problem.W @ X.mT
        S = S - S.mean(1, keepdim=True)
        grown = torch.expm1(tau * S) / tau if abs(tau) > 1e-9 else S
        mean = grown.mean(1, keepdim=True)
        return (grown - mean) / (len(X) * (1 + tau * mean))


def follow(family: Shift | Dilation, *, num_roots: int = 6, max_steps: int = 150) -> list[Tensor]:
    """Roots at τ = 1 along the curve from the start; the curve is left when it has run off, or at the budget."""
    x = family.start()
    if x is None:
        return []
    scale, z = float(x.norm()), torch.cat([x / x.norm(), x.new_zeros(1)])
    tangent, ds, roots = _tangent(family, z, scale, None), 0.05, list[Tensor]()
    for _ in range(max_steps):
        corrected = None if tangent is None else _correct(family, z + ds * tangent, tangent, scale, ds)
        if tangent is None or (corrected is None and ds < 1e-7):
            break
        if corrected is None:
            ds /= 2
            continue
        before, (z, quick) = z, corrected
        if (before[-1] - 1) * (z[-1] - 1) <= 0:
            share = (1 - before[-1]) / (z[-1] - before[-1])
            near = (before + share * (z - before))[:-1] * scale
            root = polish(family.problem, near, _TOLERANCE * float(family.problem.Y.norm()))
            roots += [] if root is None else [root]
        if len(roots) >= num_roots or not -0.5 < float(z[-1]) < 3 or float(z[:-1].norm()) > _FARTHEST:
            break
        tangent = _tangent(family, z, scale, tangent)
        ds = min(1.5 * ds, 0.5) if quick else ds
    return roots


def _bordered(family: Shift | Dilation, z: Tensor, scale: float, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """∂H/∂(x/scale, τ) above the tangent, and H."""
    x, tau = z[:-1] * scale, float(z[-1])
    H = family.value(x, tau)
    in_tau = (family.value(x, tau + _TAU) - family.value(x, tau - _TAU)) / (2 * _TAU)
    return torch.cat([torch.cat([scale * family.jacobian(x, tau), in_tau[:, None]], 1), tangent[None]]), H


def _tangent(family: Shift | Dilation, z: Tensor, scale: float, previous: Tensor | None) -> Tensor | None:
    ahead = torch.zeros_like(z)
    ahead[-1] = 1
    matrix, _ = _bordered(family, z, scale, ahead if previous is None else previous)
    tangent, info = torch.linalg.solve_ex(matrix, ahead)
    return None if info or not tangent.isfinite().all() else tangent / tangent.norm()


def _correct(
    family: Shift | Dilation, z: Tensor, tangent: Tensor, scale: float, ds: float
) -> tuple[Tensor, bool] | None:
    """Newton in the plane of the prediction, and whether few steps were enough."""
    for count in range(5):
        matrix, H = _bordered(family, z, scale, tangent)
        step, info = torch.linalg.solve_ex(matrix, torch.cat([-H, H.new_zeros(1)]))
        if info or not step.isfinite().all() or (count == 0 and float(step.norm()) > 0.5 * ds):
            return None
        z = z + step
        if float(step.norm()) <= 1e-7 * (1 + float(z.norm())):
            return z, count <= 2
    return None
