"""One attention head from its answers: as many queries as it has weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import is_zero, judge_heads, refuse
from unmask.attacks.queries.one_head.boosted_probes import (
    BoostedProbes,
    NotOneHead,
    ScoreReader,
    columns_at_once,
    measure_v,
    random_basis,
    readable,
    score_reader,
)
from unmask.attacks.queries.one_head.probe_scale import read_first
from unmask.attacks.queries.opening import silence
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence, Refused
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_NUM_EARLY = 3  # questions after the first column: is this a single head at all?
# Of the largest |t|: what early predictions may miss by. Another kind of function misses by the order of 1, and the
# fresh sequences at the end decide; this only saves the d² queries of a layer with several heads.
_EARLY_TOLERANCE = 1e-2


@dataclass(frozen=True)
class SingleHeadAttack:
    """W and v of f(X) = Σ_i softmax_i(x_iᵀ W x_n)·vᵀx_i.

        v_i = f([e_i]);   F(u, e_j) = f([e_j + u; e_j]) − v_j = (vᵀu)·σ(uᵀW e_j)   →   uᵀW e_j = logit(F/(vᵀu))

    d values of u give a column of W. Probes lean towards v (`BoostedProbes`), and are as long as the oracle's added
    errors ask for (`ScoreReader`).

    Notation: d the width, σ the logistic function, e_j unit vectors.
    Limits: v = 0 leaves W undetermined. Entries of W have the same absolute error, about that of an answer times ‖W‖/d;
    columns that are much smaller than the others have fewer digits of their own. Several heads, or anything behind
    the head, are refused: after d + d queries where early predictions fail, else on fresh sequences.
    Cost: exactly d + d² learning queries, where ‖W‖_F/√d is between 10⁻⁵ and about 1 and columns are of like norm
    (`read_first` tells what other scales cost). One ask holds as many columns as fit in 64 MiB.
    Source: Bhattamishra et al., arXiv 2601.16873, Thm 4.1. Ours: the probes, and the scale that is found on the way.
    """

    seed: int = 0

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Learn, and check on fresh sequences."""
        run = QueryRun(self.seed, progress, evidence=evidence, unknowns=evidence.width**2 + evidence.width)
        return learn_one_head(run, self._learn)

    def _learn(self, run: QueryRun, reader: ScoreReader, heads: HeadWeights) -> Recovery[HeadWeights]:
        read_columns(run, reader, heads)
        return judge_heads(run, heads, reader.fresh_boost, _describe_learned(heads))


LearnHead = Callable[[QueryRun, ScoreReader, HeadWeights], Recovery[HeadWeights]]


def learn_one_head(run: QueryRun, learn: LearnHead) -> Recovery[HeadWeights]:
    """Probe the oracle, measure v, and `learn` W; or the recovery that says why no head can be read."""
    heads = unknown_head(run.evidence)
    try:
        reader = open_head(run, heads)
        return reader if isinstance(reader, Recovery) else learn(run, reader, heads)
    except BudgetSpent as spent:
        return out_of_budget(run, heads, spent)
    except (NotOneHead, Refused) as seen:
        return refuse(run, Status.NOTHING_FOUND, str(seen))


def unknown_head(evidence: OracleEvidence) -> HeadWeights:
    """One head, every number of it unknown; learners write what they know into it."""
    unknown = torch.full((1, evidence.width), math.nan, dtype=torch.float64, device=evidence.device)
    return HeadWeights(W=unknown[:, None].repeat(1, evidence.width, 1), v=unknown)


def open_head(run: QueryRun, heads: HeadWeights) -> ScoreReader | Recovery[HeadWeights]:
    """Probe the oracle and measure v; or the recovery that says why no head can be read."""
    profile = run.probe()
    if profile.num_outputs or profile.signs_only or not profile.is_linear:
        kind = "; ".join(profile.describe())
        reason = f"The oracle does not answer with a number that grows with its only token, as one head does ({kind})."
        return refuse(run, Status.NOT_APPLICABLE, reason)
    heads.v[0] = measure_v(run.evidence, profile)
    if is_zero(heads.v[0], profile):
        if profile.absolute_error:
            return refuse(run, *silence(profile))
        reason = (
            "The answers to all single tokens are 0, so the values of the heads, summed, are 0: a single head with "
            "v = 0 answers 0 whatever W is, and heads that cancel are not a single one."
        )
        return refuse(run, Status.NOT_IDENTIFIABLE, reason)
    return score_reader(run.evidence, profile, heads.v[0].clone())


def read_columns(run: QueryRun, reader: ScoreReader, heads: HeadWeights) -> None:
    """Write all columns of W into `heads`."""
    width = len(reader.v)
    probes = BoostedProbes.random(reader.v, run.generator)
    W, unit = heads.W[0], torch.eye(width, dtype=torch.float64, device=heads.W.device)
    found = read_first(reader, probes, unit, run.generator)
    if found is None:
        W[:] = invisible(reader)
        return
    first, values = found
    W[:, first] = probes.solve(readable(values)[None])[0]
    run.num_probing += check_early(reader, unit[first], W[:, first], run.generator)
    left = torch.tensor([place for place in range(width) if place != first], dtype=torch.long)
    while len(left):
        known = width - len(left)
        run.progress("columns of W", known, width)
        size = min(known, columns_at_once(reader.pairs.evidence, width))  # twice as many each time: norms may differ
        now, left = left[:size], left[size:]
        W[:, now] = read_block(reader, probes, unit[now], column_scale(W[:, W[0].isfinite()]))


def invisible(reader: ScoreReader) -> float:
    """What W is where no score shows: 0 if tokens may have any norm; where they may not, nothing can be said."""
    if math.isfinite(reader.largest_scale):
        raise NotOneHead("W does not show in answers to tokens of the norms that the oracle accepts.")
    return 0.0


def read_block(
    reader: ScoreReader, probes: BoostedProbes, Y: Float[Tensor, "m d"], scale: float
) -> Float[Tensor, "d m"]:
    """W y for each row of Y; all probes of all of them in one ask."""
    U = probes.directions
    values = readable(reader.scores(U.repeat(len(Y), 1), Y.repeat_interleave(len(U), 0), scale))
    return probes.solve(values.reshape(len(Y), len(U))).T


def column_scale(columns: Float[Tensor, "d m"]) -> float:
    """s at which the scores of random probes have deviation 1, for the longest known column: few of them pass 5.

    It is also where noise hurts least: E[σ'(t)⁻²]^½/ρ for t of deviation ρ is 5.8 at ρ = 1, its least.
    """
    return math.sqrt(len(columns)) / float(columns.norm(dim=0).max())


def check_early(
    reader: ScoreReader, y: Float[Tensor, " d"], column: Float[Tensor, " d"], generator: torch.Generator
) -> int:
    """Predict scores of new probes at a y whose column is known, and count them; refuse what one head cannot say."""
    U = BoostedProbes(random_basis(len(y), generator)[:_NUM_EARLY].to(y), reader.v).directions
    scale = column_scale(column[:, None])
    off = float((reader.scores(U, y.expand_as(U), scale) - U @ column).abs().max()) * scale
    allowed = max(_EARLY_TOLERANCE, 100 * reader.error(scale))
    if not off <= allowed:
        raise NotOneHead(
            f"Scores that follow from the first column of W are off by {off:.1e}, where {allowed:.1e} is explained: "
            "the answers are not those of a single head."
        )
    return len(U)


def out_of_budget(run: QueryRun, heads: HeadWeights, spent: BudgetSpent) -> Recovery[HeadWeights]:
    """What is known when the budget ends: whole columns of W, and v."""
    known = int(heads.W[0].isfinite().all(0).sum())
    about_v = "v and " if heads.v.isfinite().all() else ""
    reason = (
        f"The budget ended: {spent}. Known are {about_v}{known} of {run.evidence.width} columns of W; the rest is NaN."
    )
    return refuse(run, Status.BUDGET_EXHAUSTED, reason, heads)


def _describe_learned(heads: HeadWeights) -> str:
    width = heads.v.shape[1]
    if not heads.W.any():
        return f"v from {width} one-token queries; W = 0, since no score shows in answers to tokens of any norm."
    return f"v from {width} one-token queries, and W column by column from {width**2:,} two-token queries."
