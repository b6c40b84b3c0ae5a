"""Softmax attention without its value matrix, as a map of the inputs, with its derivatives in closed form.

    X̄ = F(X)·X,   F = softmax(S) row by row,   S = X W Xᵀ

Every row of X̄ is a convex combination of the rows of X. The layer's output is X̄·V, so V factors out of every
derivative and is left to the caller.

Notation: n tokens, d their width, rows are tokens; y_k = W x_k (rows of X Wᵀ), z_i = Wᵀ x_i (rows of X W),
r_im = x_m − x̄_i, Cov_i = Σ_k f_ik r_ik r_ikᵀ.
Source: arXiv 2310.12462, section 4, transposed: the paper has tokens in columns, and u(X)_i is a column of exp(XᵀWX)
where D(X)⁻¹ scales rows; here row i is the query, S_ik = x_iᵀ W x_k. docs/outputs.md has the other discrepancies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class AttentionMap:
    """X ↦ F(X)·X for one W; a factor on the scores is part of W."""

    W: Float[Tensor, "d d"]
    causal: bool = False

    def __call__(self, X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """X̄ of one input or of many."""
        return self.weights(X) @ X

    def weights(self, X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n n"]:
        """F: row i holds how much token i takes from each token."""
        scores = X @ self.W @ X.mT
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=X.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1)

    def at(self, X: Float[Tensor, "n d"]) -> AttentionPoint:
        """The map and its derivatives at one input."""
        return AttentionPoint(self, X)


@dataclass(frozen=True)
class AttentionPoint:
    """What derivatives at X are made of; each part is computed when it is first asked for.

    Cost: jvp and vjp n²d; the dense Jacobian n²d² numbers.
    """

    map: AttentionMap
    X: Float[Tensor, "n d"]

    @cached_property
    def F(self) -> Float[Tensor, "n n"]:
        """Attention weights."""
        return self.map.weights(self.X)

    @cached_property
    def mixed(self) -> Float[Tensor, "n d"]:
        """X̄, the rows x̄_i."""
        return self.F @ self.X

    @cached_property
    def Y(self) -> Float[Tensor, "n d"]:
        """Rows y_k = W x_k: what a query is multiplied with."""
        return self.X @ self.map.W.mT

    @cached_property
    def Z(self) -> Float[Tensor, "n d"]:
        """Rows z_i = Wᵀ x_i: what a key is multiplied with."""
        return self.X @ self.map.W

    @cached_property
    def weighted_offsets(self) -> Float[Tensor, "n n d"]:
        """f_im r_im."""
        return self.F[:, :, None] * (self.X[None] - self.mixed[:, None])

    @cached_property
    def own_terms(self) -> Float[Tensor, "n d d"]:
        """Cov_i Wᵀ: how x̄_i moves because token i is its query."""
        return self.weighted_offsets.mT @ self.Y

    def jvp(self, U: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """dX̄ for dX = U: dS = U Yᵀ + Z Uᵀ, dF = F∘(dS − ⟨dS⟩), dX̄ = dF·X + F·U."""
        dF = self.weights_jvp(U @ self.Y.mT + self.Z @ U.mT)
        return dF @ self.X + self.F @ U

    def vjp(self, R: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The transpose of `jvp` applied to R: FᵀR + E·Y + Eᵀ·Z with e_ik = f_ik (r_iᵀx_k − r_iᵀx̄_i)."""
        E = self.weights_jvp(R @ self.X.mT)
        return self.F.mT @ R + E @ self.Y + E.mT @ self.Z

    def jacobian(self) -> Float[Tensor, "n d n d"]:
        """∂x̄_i/∂x_m = f_im (I + r_im z_iᵀ) + δ_im Cov_i Wᵀ."""
        J = torch.einsum("ima,ib->iamb", self.weighted_offsets, self.Z)
        J.diagonal(dim1=1, dim2=3).add_(self.F[:, :, None])
        token = torch.arange(len(self.X), device=self.X.device)
        J[token, :, token, :] += self.own_terms
        return J

    def weights_jvp(self, dS: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        """How the weights move with the scores; masked scores have weight 0 and don't move."""
        return self.F * (dS - (self.F * dS).sum(-1, keepdim=True))
