"""The one question from which heads are read: two tokens, of which the second asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.resolution import NoPlane
from unmask.evidence.oracles import OracleEvidence


@dataclass(frozen=True, eq=False)
class Pairs:
    """The signal of every head in sequences of two tokens.

        F(u, y) = f([y + u; y]) − f([y]) = Σ_h (v_hᵀu)·σ(uᵀW_h y),    f([y]) = (Σ_h v_h)ᵀ y

    With `boost` R the sequence is [y/R + R·u; y/R] and the answer is divided by R: every score stays as it was, and
    what the oracle adds to its answers, noise or rounding, is divided by R. Where tokens have a `max_norm`, R is as
    large as it lets. `linear` is a term eᵀu that is taken away as well. Of vectors, only the component in a `direction`
    is seen, if one is given.

    Notation: σ the logistic function; `sum_v` = Σ_h v_h from queries of length one, (width,) or (width, outputs).
    Limits: |u||y| ≤ max_norm²/4, or `NoPlane` is raised. R does nothing against errors relative to the answer.
    Source: arXiv 2601.16873, §4 (two-token queries); the symmetry (u, y) → (R·u, y/R) is ours.
    """

    evidence: OracleEvidence
    sum_v: Float[Tensor, "d *p"]
    boost: float = 1.0
    max_norm: float = math.inf
    linear: Float[Tensor, " d"] | None = None
    direction: Float[Tensor, " p"] | None = None

    def __call__(
        self, U: Float[Tensor, "b d"], y: Float[Tensor, "*b d"], copies: int = 1, repeats: int = 1
    ) -> Float[Tensor, "b *p"]:
        """F of each row of U, at one y or at one for each row.

        With k `copies` of the first token and l `repeats` of the second, every score grows by log(k/l).
        """
        y = y.expand(len(U), -1)
        R = self._boosts(U, y)
        query = y / R
        answers = self.evidence.ask(torch.stack([*[query + R * U] * copies, *[query] * repeats], dim=1))
        R = R.reshape(-1, *[1] * (answers.ndim - 1))
        signal = (answers - (y @ self.sum_v) / R) / R
        signal = signal if self.direction is None else signal @ self.direction
        return signal if self.linear is None else signal - U @ self.linear

    @property
    def total_v(self) -> Float[Tensor, "d *p"]:
        """Σ_h v_h, as far as it is seen."""
        return self.sum_v if self.direction is None else self.sum_v @ self.direction

    def farthest(self, y: Float[Tensor, " d"]) -> float:
        """The largest |u| that can be asked at y."""
        return self.max_norm**2 / (4 * float(y.norm()))

    def _boosts(self, U: Float[Tensor, "b d"], y: Float[Tensor, "b d"]) -> Float[Tensor, "b 1"]:
        """R for each row: the boost, or what keeps both tokens below the largest norm."""
        wanted = torch.full_like(U[:, :1], self.boost)
        if math.isinf(self.max_norm):
            return wanted
        R = torch.minimum(wanted, self.max_norm / (2 * U.norm(dim=1, keepdim=True)).clamp_min(1e-300))
        if bool((y.norm(dim=1, keepdim=True) > R * self.max_norm / 2).any()):
            raise NoPlane("telling heads apart takes longer tokens than the oracle answers")
        return R


def logit(p: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """σ⁻¹; not finite where p is outside of (0, 1), which tells a saturated or a wrong answer."""
    return p.log() - (-p).log1p()
