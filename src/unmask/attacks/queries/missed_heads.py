"""Whether heads were missed: the same number of heads, fitted anew in a small subspace, must explain all answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.queries.samples import sample_equations
from unmask.linalg.heads import HeadWeights
from unmask.linalg.least_squares import Equations, polish_equations

_DIMENSION = 3  # of the subspace: few unknowns, and a head that is missed shows in it as well
_LENGTH = 4
_MORE, _SPARE = 2, 40  # sequences: times the unknowns, and beyond
_OTHER_BOOST = 1.37  # between the two ways to ask: no power of two, which floating point would not notice
_NUM_SUBSPACES = 3  # where errors are added: a head that is hardly larger than they are hides in some of them
_WITHIN = 2.2  # times the longest token of a sequence: the sum of two and some room
_EXPLAINED = 1.8  # times the measured error: right heads leave 0.7 to 1.5 of it (chance), a missed one its share
_LEAST = 1e-14  # of an answer: what the fit's own float64 leaves


class Refit(NamedTuple):
    """What a fit leaves, the error of the answers by their own disagreement (both of an answer), and the queries."""

    left: float
    error: float
    num_queries: int

    @property
    def allowed(self) -> float:
        """What may be left, of an answer."""
        return max(_EXPLAINED * self.error, _LEAST)


def look_for_missed_heads(run: QueryRun, heads: HeadWeights, boost: float) -> Refit:
    """The worst of the refits, with the queries of all."""
    num = _NUM_SUBSPACES if run.profile.absolute_error else 1
    refits = [refit_in_subspace(run, heads, boost) for _ in range(num)]
    worst = max(refits, key=lambda refit: refit.left / refit.allowed)
    return worst._replace(num_queries=sum(refit.num_queries for refit in refits))


def refit_in_subspace(run: QueryRun, heads: HeadWeights, boost: float) -> Refit:
    """Fit as many heads as were learned, from where they are, to answers in a random subspace of three dimensions.

        g_R(y, u) = f([y/R + R·u_1; …; y/R])/R = S(y, u) + (Σ_h v_h)ᵀy/R²,   S = Σ_h Σ_i softmax_i(u_iᵀW_h y)·v_hᵀu_i

    Learning amplifies the oracle's error, so weights may be off by more than answers are. In a subspace the heads have
    9 + 3 unknowns each, and least squares takes that back; what is left then is the oracle's error, or a head that was
    missed. The oracle's error is what two R disagree by, which noise, rounding and float32 all change.

    Notation: tokens y and u_i lie in the subspace; u_n = 0. Terms gᵀy are free in the fit.
    Limits: a missed head whose share of an answer is near the oracle's own error is not seen.
    Cost: 2·(24·H + 46) queries at d ≥ 3.
    """
    width, like = heads.v.shape[1], heads.v
    k = min(_DIMENSION, width)
    B = torch.linalg.qr(torch.randn(width, k, generator=run.generator, dtype=torch.float64)).Q.T.to(like)
    heads, project = _project(run, heads)
    small = HeadWeights(W=B @ heads.W @ B.T, v=heads.v @ B.T)
    num = _MORE * (len(heads) * (k**2 + k) + k) + _SPARE
    drawn = torch.randn(num, _LENGTH, k, generator=run.generator, dtype=torch.float64).to(like)
    norm, boost = _norms(run, heads, boost, num)
    drawn = drawn / drawn.norm(dim=2, keepdim=True) * norm[:, None, None]
    y, U = drawn[:, -1], torch.cat([drawn[:, :-1], torch.zeros_like(drawn[:, -1:])], dim=1)

    answers = []
    for R in (boost, boost / _OTHER_BOOST):
        answers.append(project(run.evidence.ask((y[:, None] / R + R * U) @ B)) / R)
    mean, apart = (answers[0] + answers[1]) / 2, answers[0] - answers[1]
    slope = torch.linalg.lstsq(y, apart[:, None], driver="gelsd").solution[:, 0]  # (Σv)·(1/R² − 1/R'²)
    error = float((apart - y @ slope).norm()) / math.sqrt(num - k) / 2
    x = torch.cat([small.v.flatten(), small.W.flatten(), ((1 + _OTHER_BOOST**2) / (2 * boost**2) - 1) * small.v.sum(0)])
    fit = polish_equations(_equations(U + y[:, None], y, mean, len(heads)), x, damping=1e-6)
    size = float(mean.square().mean().sqrt().clamp_min(1e-300))
    return Refit(fit.deviation / size, error / size, 2 * num)


def _project(run: QueryRun, heads: HeadWeights) -> tuple[HeadWeights, Callable[[Tensor], Tensor]]:
    """Heads with numbers for answers: of vectors, a random component is looked at."""
    if heads.v.ndim == 2:
        return heads, lambda answers: answers
    drawn = torch.randn(heads.v.shape[2], generator=run.generator, dtype=torch.float64).to(heads.v)
    return HeadWeights(W=heads.W, v=heads.v @ drawn), lambda answers: answers @ drawn


def _norms(run: QueryRun, heads: HeadWeights, boost: float, num: int) -> tuple[Float[Tensor, " b"], float]:
    """Norms at which every head's scores, in turn, are of the order of one; and the boost that they leave room for."""
    sizes = torch.linalg.matrix_norm(heads.W) / heads.W.shape[1]
    sizes = torch.where(sizes > 0, sizes, 1.0)
    norm = (2 / sizes[torch.arange(num, device=sizes.device) % len(heads)]).sqrt()
    longest = min(run.profile.max_norm, 1e12) / _WITHIN
    boost = max(1.0, min(boost, longest / float(norm.max())))
    return norm.clamp(max=longest / boost), boost


def _equations(
    X: Float[Tensor, "b n k"], y: Float[Tensor, "b k"], answers: Float[Tensor, " b"], num_heads: int
) -> Equations:
    """Those of heads, with a free linear term gᵀy; unknowns: v, W, g."""
    of_heads, k = sample_equations(X, answers, num_heads), y.shape[1]

    def equations(x: Float[Tensor, " x"]) -> tuple[Tensor, Tensor]:
        residual, J = of_heads(x[:-k])
        return residual + y @ x[-k:], torch.cat([J, y], dim=1)

    return equations
