"""The scores of one head under any network that is positively homogeneous: no learner for the network is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.pairs import logit
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.run import Progress
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence

_NUM_PILOTS = 32
_LEAN = 0.6  # of a probe that is not along the strongest pilot; 0.8 is
_WEAK = 0.7  # of the strongest pilot's answer: probes below it are turned over, which costs a query each
_TOO_WEAK = 0.3  # of the strongest answer: below it a pair says too little to test W by
_SATURATED = 6.0  # |t| beyond which reading σ(t) loses more than two digits
_WANTED = 1.0  # root mean square of t: where noise hurts least, and few of many pass 6
_COLUMNS_AT_ONCE = 16  # what is lost when the budget ends is at most so many columns
_MOST_RESCALED = 40
_NO_SCORE = 1e9  # |y| up to which a score was looked for before W is called 0


@dataclass(frozen=True, eq=False)
class HomogeneousPairs:
    """One score for each query of two tokens, seen through a network.

        f([R·u + y/R; y/R])/R = φ(σ(uᵀWy)·u + y/R²) → σ(uᵀWy)·φ(u)        (R → ∞)

    since the score of the first token over that of the second is (R·u)ᵀW(y/R) = uᵀWy, and φ(λx) = λ·φ(x) for λ > 0.

    Notation: φ the network with the value matrix in it, φ(u) = f([u]); R² = |y|/ε makes what is neglected as small as
    the oracle's precision ε.
    Limits: bounded token norms bound R, and 1/R² is the error.
    Source: ours, for arXiv 2601.16873, §4.1, where φ is learned first, or φ(x) − φ(−x) is used.
    """

    evidence: OracleEvidence
    profile: OracleProfile

    def reach(self, size: float) -> float:
        """R for a y of this norm."""
        wanted = max(math.sqrt(size / self.profile.precision), self.profile.boost(1.0, 1.0))
        return min(max(wanted, 1e-3 * size), self.profile.max_norm / 1.5)

    def scores(self, U: Float[Tensor, "b d"], phi: Float[Tensor, " b"], Y: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """uᵀWy, row by row; not finite where the answer is none of one head, or saturated."""
        R = self.reach(float(Y.norm(dim=1).max()))
        answers = self.evidence.ask(torch.stack([R * U + Y / R, Y / R], dim=1))
        return logit(answers / (R * phi))


@dataclass(frozen=True, eq=False)
class Scores:
    """W as far as it is known (NaN elsewhere), and how it was asked."""

    W: Float[Tensor, "d d"]
    pairs: HomogeneousPairs
    probes: Float[Tensor, "d d"]
    phi: Float[Tensor, " d"]
    size: float  # |y| at which scores are of the order of one
    spent: BudgetSpent | None = None

    def predicts(self, generator: torch.Generator, count: int) -> tuple[float, float]:
        """The largest error of σ on new pairs, and the relative error that the oracle itself explains.

        Cost: 2·count queries.
        """
        frame = torch.randn(2, count, len(self.W), generator=generator, dtype=torch.float64).to(self.W)
        u0 = self.probes[0]
        U, Y = _LEAN * frame[0] / frame[0].norm(dim=1, keepdim=True) + math.sqrt(1 - _LEAN**2) * u0, frame[1]
        Y = self.size * Y / Y.norm(dim=1, keepdim=True)
        phi = self.pairs.evidence.ask(U[:, None])
        seen = self.pairs.scores(U, phi, Y).sigmoid()
        off = (seen - torch.einsum("bd,de,be->b", U, self.W, Y).sigmoid()).abs()
        largest = float(self.phi.abs().max())
        kept = phi.abs() > _TOO_WEAK * largest
        own = self.pairs.profile
        return float(off[kept].max()) if kept.any() else math.inf, own.precision + own.absolute_error / largest


def learn_scores(
    evidence: OracleEvidence, profile: OracleProfile, generator: torch.Generator, progress: Progress
) -> Scores | None:
    """W of one head under a homogeneous φ; None where φ answers 0 to all pilots.

    Probes lean towards the strongest of some pilots, so φ(u) is never small; W y from d of them by a linear solve.

    Limits: φ ≠ 0. NaN columns where no scale gives scores that can be read: then it is not one head.
    W = 0 where no y up to a norm of 1e9 shows a score.
    Cost: d² + 2·d queries, of which d/2 are remembered; 32 pilots, turned probes, and 32 for each attempt at the scale.
    Columns much longer than the others cost d more each.
    """
    pairs = HomogeneousPairs(evidence, profile)
    found = _probes(evidence, profile, generator)
    if found is None:
        return None
    U, phi = found
    size = _scale(pairs, U, phi, generator)
    if size is None:
        return Scores(torch.zeros_like(U), pairs, U, phi, 1.0)
    W = torch.full((evidence.width, evidence.width), torch.nan, dtype=torch.float64, device=evidence.device)
    unit = torch.eye(evidence.width, dtype=torch.float64, device=evidence.device)
    try:
        for block in torch.arange(evidence.width).split(_COLUMNS_AT_ONCE):
            progress("columns of W", int(block[0]), evidence.width)
            W[:, block] = torch.linalg.solve(U, _columns(pairs, U, phi, unit[block], size).T)
    except BudgetSpent as spent:
        return Scores(W, pairs, U, phi, size, spent)
    return Scores(W, pairs, U, phi, size)


def _probes(
    evidence: OracleEvidence, profile: OracleProfile, generator: torch.Generator
) -> tuple[Float[Tensor, "d d"], Float[Tensor, " d"]] | None:
    """d linearly independent unit vectors with φ of each, none of it small; None where φ is 0."""
    width = evidence.width
    longer = min(profile.boost(1.0, 1.0), profile.max_norm / 1.5)

    def phi_of(U: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        return evidence.ask(longer * U[:, None]) / longer

    pilots = torch.randn(_NUM_PILOTS, width, generator=generator, dtype=torch.float64).to(evidence.device)
    pilots = pilots / pilots.norm(dim=1, keepdim=True)
    answers = phi_of(pilots)
    best = int(answers.abs().argmax())
    if float(answers[best].abs()) <= 5 * profile.absolute_error / longer:
        return None
    random = torch.randn(width, width - 1, generator=generator, dtype=torch.float64).to(pilots)
    aside = torch.linalg.qr(torch.cat([pilots[best][:, None], random], dim=1)).Q.T[1:]
    along = math.sqrt(1 - _LEAN**2) * pilots[best]
    U = torch.cat([pilots[best][None], along + _LEAN * aside])
    phi = phi_of(U)
    weak = (phi.abs() < _WEAK * phi[0].abs()).nonzero()[:, 0]
    if len(weak):
        turned = 2 * along - U[weak]
        phi_turned = phi_of(turned)
        is_better = phi_turned.abs() > phi[weak].abs()
        U[weak[is_better]], phi[weak[is_better]] = turned[is_better], phi_turned[is_better]
    return U, phi


def _scale(
    pairs: HomogeneousPairs, U: Float[Tensor, "d d"], phi: Float[Tensor, " d"], generator: torch.Generator
) -> float | None:
    """|y| at which scores of random pairs have the root mean square that is wanted; None where none is seen."""
    count = min(_NUM_PILOTS, len(U))
    y = torch.randn(count, U.shape[1], generator=generator, dtype=torch.float64).to(U)
    y = y / y.norm(dim=1, keepdim=True)
    size = 1.0
    for _ in range(_MOST_RESCALED):
        t = pairs.scores(U[:count], phi[:count], size * y)
        if not t.isfinite().all() or float(t.abs().max()) > _SATURATED:
            size /= 8
            continue
        typical = float(t.square().mean().sqrt())
        if typical > 0.3:
            return size * _WANTED / typical
        if size >= _NO_SCORE:
            return None
        size *= 8
    return size


def _columns(
    pairs: HomogeneousPairs, U: Float[Tensor, "d d"], phi: Float[Tensor, " d"], Y: Float[Tensor, "m d"], size: float
) -> Float[Tensor, "m d"]:
    """uᵀW y for all probes (columns) and all y (rows); NaN where no scale gives scores that can be read."""
    count = len(U)
    along = pairs.scores(U[:1].expand_as(Y), phi[:1].expand(len(Y)), size * Y)
    # An error of σ that is relative to it is an error of t times 1 + eᵗ: small for negative t, so y is turned.
    turned = torch.where(along > 0, -1.0, 1.0).to(Y)
    Y = turned[:, None] * Y
    scores = torch.full((len(Y), count), torch.nan, dtype=torch.float64, device=Y.device)
    todo, sizes = torch.arange(len(Y), device=Y.device), Y.new_full((len(Y),), size)
    for _ in range(_MOST_RESCALED):
        long = (sizes[todo, None] * Y[todo]).repeat_interleave(count, dim=0)
        t = pairs.scores(U.repeat(len(todo), 1), phi.repeat(len(todo)), long).reshape(-1, count)
        largest = t.abs().nan_to_num(nan=torch.inf).amax(dim=1)
        is_read = largest <= _SATURATED
        scores[todo[is_read]] = t[is_read] / sizes[todo[is_read], None]
        sizes[todo] *= torch.where(largest.isfinite(), _SATURATED / 2 / largest, 1 / 8)
        todo = todo[~is_read]
        if len(todo) == 0 or float(sizes[todo].min()) < size * 1e-9:
            break
    return turned[:, None] * scores
