"""Feeding a network through heads whose scores are known: each head is made to read one token of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.evidence.oracles import OracleEvidence

_LEAKED = 8.0  # e^−8 of the precision is what the other tokens together may add to the one that is read
_OWN_SCORE = 0.1  # at the most, of the asking token: next to nothing beside a margin of 25 or more


@dataclass(frozen=True, eq=False)
class Routing:
    """The network behind several heads as a function on R^(H·d): head h reads x_h, whatever x_1 … x_H are.

        W_hᵀ(x_h − x_g)·y = K for g ≠ h,   W_hᵀx_h·y = K;    φ(x_1, …, x_H) ≈ f([R·x_1; …; R·x_H; y/R])/R

    H² linear equations for d unknowns. Then x_h wins head h by a margin of K over every other token, and over the
    asking one, whose own score is yᵀW_h y/R². R takes that to 0 and leaves the others.

    Notation: φ the network, the value matrices in it; K = log(1/ε) + 8 for an oracle of precision ε.
    Limits: H² ≤ d; x_1 … x_H must be such that the equations are independent, which random ones are (0 is not).
    Source: ours.
    """

    evidence: OracleEvidence
    W: Float[Tensor, "h d d"]
    precision: float

    @property
    def size(self) -> int:
        """The width of φ's input."""
        return self.W.shape[0] * self.W.shape[1]

    def __call__(self, x: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """φ of each row."""
        tokens = x.to(self.W).reshape(len(x), *self.W.shape[:2])
        y = self.asking(tokens)
        longest = torch.linalg.matrix_norm(self.W, ord=2).max()
        R = (y.norm(dim=1) * torch.sqrt(longest / _OWN_SCORE)).clamp_min(1.0)[:, None]
        sequences = torch.cat([R[:, :, None] * tokens, (y / R)[:, None]], dim=1)
        return (self.evidence.ask(sequences) / R[:, 0]).cpu()

    def asking(self, tokens: Float[Tensor, "b h d"]) -> Float[Tensor, "b d"]:
        """y for each row of tokens, the shortest that solves the equations."""
        margin = math.log(1 / self.precision) + _LEAKED
        seen = torch.einsum("hde,bgd->bhge", self.W, tokens)  # (batch, head, token): W_hᵀx_g
        own = torch.einsum("bhhe->bhe", seen)
        wins = own[:, :, None] - seen
        # Head h's equation against its own token is 0 = 0; its place is taken by the one against the asking token.
        same = torch.eye(len(self.W), dtype=torch.bool, device=self.W.device)[None, :, :, None]
        equations = torch.where(same, own[:, :, None], wins).flatten(1, 2)
        right = equations.new_full((len(tokens), equations.shape[1], 1), margin)
        scale = equations.norm(dim=2, keepdim=True).amax(dim=1, keepdim=True)
        # The default driver's last digits depend on where memory lies; then a run that starts again would ask anew.
        found = torch.linalg.lstsq((equations / scale).cpu(), (right / scale).cpu(), driver="gelsd")
        return found.solution[:, :, 0].to(self.W)
