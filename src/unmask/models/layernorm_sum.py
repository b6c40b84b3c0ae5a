"""LayerNorm of a sum of a token and a position embedding, projected, for the whole vocabulary at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

_POSITIONS_AT_ONCE = 8


@dataclass(frozen=True)
class LayerNormOfSum:
    """Projections of x(t, p) = LN(w_t + p_p) for all tokens t, without ever forming x.

    With centred embeddings w̄, p̄, scale g, shift β and σ² = mean((w̄ + p̄)²) + ε:

        x·M = (w̄·(g∘M) + p̄·(g∘M)) / σ + β·M

    so a table over tokens and a table over positions, made once, give every pair by one addition and one division.
    Centring is a projection, w̄·A = w·Ā, so the small matrix is centred and not the vocabulary.
    Cost: vocab·d·(k + positions) once, then vocab·k a position, instead of vocab·d·k a position.
    """

    tokens: Float[Tensor, "vocab d"]
    positions: Float[Tensor, "positions d"]
    norm: nn.LayerNorm
    projection: nn.Linear | None = None  # behind the norm, where embeddings are narrower than the stream

    def parts(self, num_positions: int) -> tuple[Float[Tensor, "t d"], Float[Tensor, "p d"], Float[Tensor, " d"]]:
        """Vectors that every x(t, p) is a combination of: g∘w̄_t, g∘p̄_p and β."""
        return self.scale_rows(self.tokens), self.scale_rows(self.positions[:num_positions]), self.shift

    def scale_rows(self, rows: Float[Tensor, "n w"]) -> Float[Tensor, "n d"]:
        """g∘w̄ of rows that are summed, and what the projection makes of it."""
        scaled = self.norm.weight * (rows - rows.mean(1, keepdim=True))
        return scaled if self.projection is None else scaled @ self.projection.weight.T

    @property
    def shift(self) -> Float[Tensor, " d"]:
        """β, and what the projection makes of it."""
        return self.norm.bias if self.projection is None else self.projection(self.norm.bias)

    def project_positions(
        self, matrix: Float[Tensor, "d k"], positions: Sequence[int]
    ) -> Iterator[Float[Tensor, "vocab k"]]:
        """x(t, p)·M of every token, one position after the other."""
        matrix = matrix.to(self.tokens)
        constant = self.shift @ matrix
        if self.projection is not None:
            matrix = self.projection.weight.T @ matrix
        d, k = matrix.shape
        scaled = self.norm.weight[:, None] * matrix
        mean = torch.full((d, 1), 1 / d).to(matrix)
        token_table, means = (self.tokens @ torch.cat([scaled - scaled.mean(0), mean], dim=1)).split([k, 1], dim=1)
        token_variances = self.tokens.norm(dim=1, keepdim=True).square() / d - means.square()
        for begin in range(0, len(positions), _POSITIONS_AT_ONCE):
            chosen = self.positions[list(positions[begin : begin + _POSITIONS_AT_ONCE])]
            chosen = chosen - chosen.mean(1, keepdim=True)
            variances = token_variances + (2 * (self.tokens @ chosen.T) + chosen.square().sum(1)) / d
            scales = (variances + self.norm.eps).rsqrt()
            for index, row in enumerate(chosen @ scaled):
                yield (token_table + row) * scales[:, index, None] + constant
