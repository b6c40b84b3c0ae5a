"""How fast attention bends: a Lipschitz constant of its Jacobian that holds.

    ‖J̄(X) − J̄(X′)‖₂ ≤ K₂‖X − X′‖_F,   K₂ = w²ρ³(√n + 2 + 2√2) + wρ(√n + 2√2)

for all X, X′ whose tokens have norm at most ρ, with any mask: J̄ is the Jacobian of X̄ = softmax(X W Xᵀ)·X, w = ‖W‖₂.

Proof. The set of such X is convex, so K₂ may be any bound of ‖D²X̄[U, U]‖_F over ‖U‖_F = 1 (a symmetric bilinear map of
Euclidean spaces has its norm on the diagonal; Banach). Write ⟨·⟩ for the mean over k with weights f_ik, a tilde for
what is left after subtracting it, a_k = u_iᵀW x_k + x_iᵀW u_k for the derivative of the scores of row i, and
b_k = u_iᵀW u_k for half their second derivative. Differentiating a softmax mean twice,

    d²x̄_i = ⟨x̃ ã²⟩ + 2⟨ũ ã⟩ + 2⟨x̃ b̃⟩

Let η_i = ‖u_i‖ and τ_i² = ⟨‖ũ‖²⟩. The matrix diag(f) − f fᵀ has norm at most ½ (Gershgorin: 2f(1 − f) ≤ ½), and so
τ_i² ≤ ½; ⟨‖x̃‖²⟩ ≤ ρ² and ‖x̃_k‖ ≤ 2ρ. As ã_k = u_iᵀW x̃_k + x_iᵀW ũ_k, Minkowski gives ⟨ã²⟩^½ ≤ wρ(η_i + τ_i), hence by
Cauchy–Schwarz ‖d²x̄_i‖ ≤ 2w²ρ³(η_i + τ_i)² + 2wρτ_i(η_i + τ_i) + 2wρη_iτ_i. Over the rows, Σ η_i² = 1 and so
‖(η_i²)_i‖₂ ≤ 1, ‖(2η_iτ_i)_i‖₂ ≤ √2, ‖(τ_i²)_i‖₂ ≤ √n/2: add up.  ∎

For n = 2 and W → 0 ascent reaches K₂. The rougher √n(8w²ρ³ + 8wρ) follows from it; its first part is 3.6 times as large
at n = 16.

Notation: n tokens of width d; w the spectral norm of W; ρ the largest norm of a token.
Source: ours; `benchmarks/outputs/paper_bounds.py` has the constants of the paper's loss.
"""

from __future__ import annotations

import math

from unmask.errors import InputError


def jacobian_lipschitz(W_norm: float, radius: float, n: int) -> float:
    """K₂: by how much ‖J̄‖₂ changes for a change of X of norm 1, while no token's norm exceeds `radius`."""
    if n < 1 or W_norm < 0 or radius < 0:
        raise InputError(f"norms must be at least 0 and n at least 1, got n={n}, W_norm={W_norm}, radius={radius}")
    root, twice = math.sqrt(n), 2 * math.sqrt(2)
    return W_norm**2 * radius**3 * (root + 2 + twice) + W_norm * radius * (root + twice)
