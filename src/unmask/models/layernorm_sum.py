"""LayerNorm of a sum of a token and a position embedding, projected, for the whole vocabulary at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerNormOfSum:
    """Projections of x(t, p) = LN(w_t + p_p) for all tokens t, without ever forming x.

    With centred embeddings w̄, p̄, scale g, shift β and σ² = mean((w̄ + p̄)²) + ε:

        x·M = (w̄·(g∘M) + p̄·(g∘M)) / σ + β·M

    so a table over tokens and a table over positions, made once, give every pair by one addition and one division.
    Cost: vocab·d·(k + positions) once, then vocab·k a position, instead of vocab·d·k a position.
    """

    tokens: Float[Tensor, "vocab d"]
    positions: Float[Tensor, "positions d"]
    norm: nn.LayerNorm

    def project_positions(
        self, matrix: Float[Tensor, "d k"], positions: Sequence[int]
    ) -> Iterator[Float[Tensor, "vocab k"]]:
        """x(t, p)·M of every token, one position after the other."""
        matrix = matrix.to(self.tokens)
        scaled = self.norm.weight[:, None] * matrix
        tokens = _centred(self.tokens)
        chosen = _centred(self.positions[torch.as_tensor(positions, device=self.positions.device)])
        token_table, position_table, constant = tokens @ scaled, chosen @ scaled, self.norm.bias @ matrix
        cross = tokens @ chosen.T * (2 / tokens.shape[1])
        variances = tokens.square().mean(1, keepdim=True) + chosen.square().mean(1) + cross
        deviations = (variances + self.norm.eps).sqrt()
        for index in range(len(positions)):
            yield (token_table + position_table[index]) / deviations[:, index, None] + constant


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(-1, keepdim=True)
