"""The heads of one attention layer: their function, and the shortest list of heads with the same function."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from unmask.displays import DisplayedFields
from unmask.errors import InputError

# Rounding to float32 moves a head by 6e-8 of its norm and recovery in float32 by about 5e-7, while trained
# heads differ by the order of 1. So heads closer than this are one head, and sums smaller than this are 0.
EQUAL_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False, repr=False)
class HeadWeights(DisplayedFields):
    """The heads of an attention layer, f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·v_hᵀ x_i; x_n is the last row.

    `v` is (heads, width) where the layer answers with a number, (heads, width, outputs) where with a vector.
    """

    W: Float[Tensor, "h d d"]
    v: Float[Tensor, "h d *p"]

    def __post_init__(self) -> None:
        """Check that the shapes fit together."""
        fits = self.v.ndim in (2, 3) and self.W.shape == (*self.v.shape[:2], self.v.shape[1])
        if not fits:
            raise InputError(
                "W must be (heads, width, width) and v (heads, width) or (heads, width, outputs), "
                f"got W {tuple(self.W.shape)} and v {tuple(self.v.shape)}."
            )

    def __len__(self) -> int:
        """The number of heads."""
        return len(self.v)

    def __call__(self, X: Float[Tensor, "b n d"]) -> Float[Tensor, "b *p"]:
        """f of a batch of sequences, in their precision.

        Cost: batch·heads·width·(width + length); nothing of the size of a token for every head is kept.
        """
        shape = (len(X), *self.v.shape[2:])
        answers = X.new_zeros(shape)
        for W, v in zip(self.W.to(X), self.v.to(X), strict=True):
            scores = torch.einsum("bnd,bd->bn", X, X[:, -1] @ W.T)
            answers = answers + torch.einsum("bn,bnd->bd", scores.softmax(1), X) @ v
        return answers

    def cpu(self) -> HeadWeights:
        """The same heads in ordinary memory."""
        return HeadWeights(W=self.W.cpu(), v=self.v.cpu())

    def select(self, kept: Tensor) -> HeadWeights:
        """The heads where `kept` is true."""
        return HeadWeights(W=self.W[kept], v=self.v[kept])


def canonical_heads(heads: HeadWeights, tolerance: float = EQUAL_TOLERANCE) -> HeadWeights:
    """The shortest list of heads with the same function: equal W merged, v = 0 dropped; in float64.

        (W, v₁), (W, v₂) → (W, v₁ + v₂);   (W, 0) → nothing

    Notation: W and v as in `HeadWeights`; equal means ‖W_g − W_h‖ ≤ tolerance·max(‖W_g‖, ‖W_h‖), zero means
    ‖v‖ ≤ tolerance·max_h ‖v_h‖; both are Frobenius norms.
    Limits: closeness is chained, so a row of close heads becomes one head with their mean W.
    Source: Bhattamishra et al., arXiv 2601.16873, Prop. 7.1 (what is not identifiable); Kim et al.,
    arXiv 2608.03294 (the canonical form is unique up to order).
    """
    W, v = heads.W.detach().double(), heads.v.detach().double()
    if len(heads) == 0:
        return HeadWeights(W=W, v=v)
    flat, values = W.flatten(1), v.flatten(1)
    norm = torch.linalg.vector_norm(flat, dim=1)
    # The other modes of cdist expand the square and see no difference below 1e-8.
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    is_equal = distance <= tolerance * torch.maximum(norm[:, None], norm[None, :])
    num_groups, group = connected_components(is_equal.cpu().numpy(), directed=False)
    member = torch.from_numpy(group == np.arange(num_groups)[:, None]).to(W)  # (groups, heads)
    merged_W = (member @ flat / member.sum(dim=1, keepdim=True)).reshape(-1, *W.shape[1:])
    merged = HeadWeights(W=merged_W, v=(member @ values).reshape(-1, *v.shape[1:]))
    largest = torch.linalg.vector_norm(values, dim=1).max()
    return merged.select(torch.linalg.vector_norm(merged.v.flatten(1), dim=1) > tolerance * largest)
