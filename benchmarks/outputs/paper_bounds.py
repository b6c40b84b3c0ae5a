"""Bounds on derivatives of the paper's loss: constants that hold, and how far they are from what is seen.

Notation: as in `unmask.linalg.attention_bounds`, which has K₂; v the spectral norm of V, R the paper's bound on norms.
Source: arXiv 2310.12462, Lemma 4.4 (the Hessian is Lipschitz, of the order n³d³R¹⁰) and Lemma 4.5 (it is positive
definite for a γ of the order n·d·R⁸), for ‖W‖_F, ‖V‖_F ≤ R, |b_ij| ≤ R and R > 1. The constants of its appendix were
not at hand: `paper_gamma` and `paper_lipschitz` have 1 in their place; all other constants are ours, with proofs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError
from unmask.linalg.attention_bounds import jacobian_lipschitz
from unmask.linalg.softmax_attention import AttentionMap

_TAU = math.sqrt(0.5)  # bound of τ_i
_SPREAD = 1 + _TAU  # bound of η_i + τ_i


def jacobian_norm(W_norm: float, radius: float, n: int) -> float:
    """K₁ ≥ ‖J̄(X)‖₂ = max ‖(⟨x̃ ã⟩ + ⟨u⟩)_i‖_F: √n + wρ²(1 + √(n/2)).

    ‖⟨x̃ ã⟩‖ ≤ wρ²(η_i + τ_i), and the rows ⟨u⟩ are F·U with ‖F‖₂ ≤ √n, as rows of F add up to 1.
    """
    _check(n, W_norm, radius)
    return math.sqrt(n) + W_norm * radius**2 * (1 + _TAU * math.sqrt(n))


def third_derivative(W_norm: float, radius: float, n: int) -> float:
    """K₃ ≥ ‖D³X̄‖: by how much D²X̄ changes.

    With joint cumulants κ under f_i, d³x̄_i = κ(x,a,a,a) + 6κ(x,a,b) + 3κ(u,a,a) + 6κ(u,b), where
    κ(x,a,a,a) = ⟨x̃ ã³⟩ − 3⟨x̃ ã⟩⟨ã²⟩. Beside the bounds above, |ã_k| ≤ wρ(2η_i + √2), ‖ũ_k‖ ≤ √2 and
    ⟨b̃²⟩^½ ≤ wη_iτ_i; every row is taken at its worst, η_i = 1, and n rows give √n.
    """
    _check(n, W_norm, radius)
    w, rho, s = W_norm, radius, _SPREAD
    quartic = w**3 * rho**4 * (2 * (2 + math.sqrt(2)) * s**2 + 3 * s**3)
    cubic = w**2 * rho**2 * (12 * s * _TAU + 3 * math.sqrt(2) * s**2)
    return math.sqrt(n) * (quartic + cubic + 6 * w * _TAU**2)


@dataclass(frozen=True)
class Sizes:
    """What the bounds on L depend on: norms of the layer, of its output and of a token."""

    n: int
    W_norm: float
    V_norm: float
    B_norm: float  # Frobenius
    radius: float

    @classmethod
    def all_at_most(cls, R: float, n: int) -> Sizes:
        """One R bounds all norms; the paper's bounds W and V in Frobenius norm and the entries of B."""
        return cls(n, R, R, R, R)

    @property
    def residual(self) -> float:
        """‖c‖_F ≤ √n·ρ·v + ‖B‖_F: rows of X̄ are convex combinations of tokens."""
        return math.sqrt(self.n) * self.radius * self.V_norm + self.B_norm


def paper_gamma(n: int, d: int, R: float) -> float:
    """n·d·R⁸, the order of the γ for which Lemma 4.5 has the Hessian positive definite.

    The paper writes γ = O(−n·d·R⁸), of which the sign cannot be meant: −n·d·R⁸ is the bound from below on the
    eigenvalues without γ.
    """
    return n * d * R**8


def paper_lipschitz(n: int, d: int, R: float) -> float:
    """n³d³R¹⁰, the order of Lemma 4.4's Lipschitz constant of ∇²L."""
    return (n * d) ** 3 * R**10


def convexity_gamma(sizes: Sizes) -> float:
    """A γ for which L is convex wherever no token is longer than ρ: v·‖c‖·K₂, about n·R⁸.

    uᵀQu = Σ_i q_iᵀd²x̄_i ≥ −‖q‖_F·K₂ with ‖q‖ ≤ v‖c‖, JᵀJ ≥ 0, and γ adds 2γ to ∇²L = 2JᵀJ + 2Q.
    """
    return sizes.V_norm * sizes.residual * jacobian_lipschitz(sizes.W_norm, sizes.radius, sizes.n)


def hessian_lipschitz(sizes: Sizes) -> float:
    """By how much ∇²L changes for a change of X of norm 1: 2(3v²K₁K₂ + v‖c‖K₃).

    Along a path J changes by K₂ in either factor of JᵀM J, q by v²K₁ in front of D²X̄, and D²X̄ by K₃ behind q.
    """
    shape = sizes.W_norm, sizes.radius, sizes.n
    moved = 3 * sizes.V_norm**2 * jacobian_norm(*shape) * jacobian_lipschitz(*shape)
    return 2 * (moved + sizes.V_norm * sizes.residual * third_derivative(*shape))


def tightness(
    attention: AttentionMap, radius: float, n: int, generator: torch.Generator, *, num_starts: int = 8, steps: int = 100
) -> float:
    """K₂ over the largest ‖D²X̄[U, U]‖ that gradient ascent in X and U finds; at least 1, where 1 is tight."""
    observed = largest_second_derivative(attention, radius, n, generator, num_starts=num_starts, steps=steps)
    bound = jacobian_lipschitz(float(torch.linalg.matrix_norm(attention.W, 2)), radius, n)
    return bound / observed if observed else math.inf  # one token: X̄ is X


def largest_second_derivative(
    attention: AttentionMap, radius: float, n: int, generator: torch.Generator, *, num_starts: int = 8, steps: int = 100
) -> float:
    """The largest ‖D²X̄[U, U]‖_F that Adam finds over tokens of norm at most `radius` and ‖U‖_F = 1.

    By the mean value theorem no quotient ‖J̄(X) − J̄(X′)‖/‖X − X′‖ is larger than the largest of all.
    """
    shape = num_starts, n, len(attention.W)
    draws = [torch.randn(shape, generator=generator, dtype=attention.W.dtype) for _ in range(2)]
    X, U = (draw.requires_grad_() for draw in draws)
    optimiser = torch.optim.Adam([X, U], lr=0.05, maximize=True)
    best = 0.0
    for _ in range(steps):
        optimiser.zero_grad()
        norms = second_derivative(attention, _inside(X, radius), U / U.norm(dim=(1, 2), keepdim=True)).norm(dim=(1, 2))
        best = max(best, float(norms.detach().max()))
        norms.log().sum().backward()
        optimiser.step()
    return best


def second_derivative(
    attention: AttentionMap, X: Float[Tensor, "*batch n d"], U: Float[Tensor, "*batch n d"]
) -> Float[Tensor, "*batch n d"]:
    """D²X̄[U, U], rows ⟨x̃ ã²⟩ + 2⟨ũ ã⟩ + 2⟨x̃ b̃⟩."""
    W, F = attention.W, attention.weights(X)
    slopes = U @ W @ X.mT + X @ W @ U.mT
    slopes = slopes - (F * slopes).sum(-1, keepdim=True)
    bends = slopes.square() + 2 * U @ W @ U.mT
    bends = bends - (F * bends).sum(-1, keepdim=True)
    return (F * bends) @ X + 2 * (F * slopes) @ U


def _inside(X: Float[Tensor, "*batch n d"], radius: float) -> Float[Tensor, "*batch n d"]:
    """Tokens that are too long, shortened."""
    return X * (radius / X.norm(dim=-1, keepdim=True).clamp_min(radius))


def _check(n: int, W_norm: float, radius: float) -> None:
    if n < 1 or W_norm < 0 or radius < 0:
        raise InputError(f"norms must be at least 0 and n at least 1, got n={n}, W_norm={W_norm}, radius={radius}")
