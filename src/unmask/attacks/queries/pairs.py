"""The one question from which heads are read: two tokens, of which the second asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.evidence.oracles import OracleEvidence


@dataclass(frozen=True, eq=False)
class Pairs:
    """The signal of every head in sequences of two tokens.

        F(u, y) = f([y + u; y]) − f([y]) = Σ_h (v_hᵀu)·σ(uᵀW_h y),    f([y]) = (Σ_h v_h)ᵀ y

    With `boost` R the sequence is [y/R + R·u; y/R] and the answer is divided by R: every score stays as it was, and
    what the oracle adds to its answers, noise or rounding, is divided by R.

    Notation: σ the logistic function; `sum_v` = Σ_h v_h from queries of length one, (width,) or (width, outputs).
    Limits: R cannot exceed what token norms allow, and does nothing against errors that are relative to the answer.
    Source: arXiv 2601.16873, §4 (two-token queries); the symmetry (u, y) → (R·u, y/R) is ours.
    """

    evidence: OracleEvidence
    sum_v: Float[Tensor, "d *p"]
    boost: float = 1.0

    def __call__(self, U: Float[Tensor, "b d"], y: Float[Tensor, " d"]) -> Float[Tensor, "b *p"]:
        """F of each row of U, at one y."""
        query = (y / self.boost).expand(len(U), -1)
        answers = self.evidence.ask(torch.stack([query + self.boost * U, query], dim=1))
        return (answers - y @ self.sum_v / self.boost) / self.boost


def logit(p: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """σ⁻¹; not finite where p is outside of (0, 1), which tells a saturated or a wrong answer."""
    return p.log() - (-p).log1p()
