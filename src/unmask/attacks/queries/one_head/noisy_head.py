"""One head from answers that are noisy or rounded: many passes, no two of which make the same error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import judge_heads, refuse
from unmask.attacks.queries.one_head.boosted_probes import (
    BoostedProbes,
    ScoreReader,
    columns_at_once,
    measure_v,
    random_basis,
    score_reader,
)
from unmask.attacks.queries.one_head.single_head import (
    column_scale,
    learn_one_head,
    read_block,
    read_columns,
)
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.errors import InputError
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_SCALE_SPREAD = 0.15  # of the scale, from pass to pass: together with turning, enough to make roundings independent
_CHANCE = 2.2  # over the width: d² errors of W have a norm that is larger than expected by 1 + 2.2/d, once in 1,000
_MOST_ERROR = 0.5  # of W: beyond it the mean is more noise than W


@dataclass(frozen=True)
class NoisyAttack:
    """W and v of a single head, averaged over passes that are turned and scaled at random.

    The paper, with unit probes u = κe_i, y = κe_j, κ = B^(−½), so that |t| ≤ 1 where |W_ij| ≤ B:

        |Ŵ_ij − W_ij| ≤ B·|Δt|,  |Δt| ≤ |Δσ|/σ'(1) = 5.1·|Δσ|,  |Δσ| ≤ (τ_f + 2κτ_v)/(κ(γ − τ_v))
        →  |Ŵ_ij − W_ij| ≤ 5.1·B^(3/2)·(τ_f + 2κτ_v)/(γ − τ_v),  where Ŵ_ij is cut at ±B

    Ours, with probes of length L that lean towards v (`BoostedProbes`) and scores of deviation 1:

        ‖Ŵ − W‖/‖W‖ ≈ 12·τ/(L·|v|·√passes)

    no margin γ, and an error that falls with L: (u, y) → (Lu, y/L) keeps all scores. Only a bound on the norm of
    tokens stops that. Each pass turns the tokens that v is measured with, the probes, and y, and scales by ±15 %, so
    that rounding, which repeats itself, errs anew. The spread over passes is the error of their mean. It is told,
    with what fresh sequences are off by beyond noise: a bias that no averaging takes away.

    Notation: τ_f, τ_v the tolerance of answers and of v; γ = min|v_i|; τ the deviation of an answer's error;
    B a bound on |W_ij|.
    Limits: averaging does not help against errors that are the same in every pass, nor a bias of the logit, which is
    of second order in τ/(L|v|): the told error is honest while it is well below 1.
    Cost: passes·(d² + d) learning queries.
    Source: arXiv 2601.16873, Thm 6.1, its bound re-derived above; probes, length and passes are ours.
    """

    passes: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the number of passes."""
        if self.passes < 2:
            raise InputError(f"passes must be 2 or more, since their spread tells the error, got {self.passes}")

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Learn, pass by pass, and check on fresh sequences."""
        run = QueryRun(self.seed, progress, evidence=evidence, unknowns=evidence.width**2 + evidence.width)
        return learn_one_head(run, self._learn)

    def _learn(self, run: QueryRun, reader: ScoreReader, heads: HeadWeights) -> Recovery[HeadWeights]:
        read_columns(run, reader, heads)
        spread = _Spread(heads.W[0].clone(), heads.v[0].clone())
        is_zero = not bool(heads.W.any())  # found so by tokens of any norm: there is nothing to average
        for done in range(1, 1 if is_zero else self.passes):
            run.progress("passes", done, self.passes)
            spread.add(*_one_pass(run, column_scale(spread.mean_W)))
            heads.W[0], heads.v[0] = spread.mean_W, spread.mean_v
        if spread.error > _MOST_ERROR:
            why = f"By the spread over {self.passes} passes W is off by {spread.error:.1e} of itself: use more."
            return refuse(run, Status.NOTHING_FOUND, why)
        reason = f"W and v are the means of {spread.count} passes."
        judgement = judge_heads(run, heads, reader.fresh_boost, reason)
        lasting = judgement.certificate.details.get("lasting_error", 0.0)
        error = math.hypot(spread.error * (1 + _CHANCE / run.evidence.width), lasting)
        details = {**judgement.certificate.details, "estimated_error": error}
        why = f"{judgement.reason} By their spread and by fresh sequences W is off by {error:.1e} of itself."
        why = why if judgement.status is Status.RECOVERED else judgement.reason
        return replace(judgement, reason=why, certificate=replace(judgement.certificate, details=details))


def _one_pass(run: QueryRun, scale: float) -> tuple[Float[Tensor, "d d"], Float[Tensor, " d"]]:
    """W and v from d² + d queries, none of which any other pass asks."""
    evidence, generator, d = run.evidence, run.generator, run.evidence.width
    basis, Y = (random_basis(d, generator).to(evidence.device) for _ in range(2))
    reader = score_reader(evidence, run.profile, measure_v(evidence, run.profile, basis))
    probes = BoostedProbes.random(reader.v, generator)
    scale *= 1 + _SCALE_SPREAD * (2 * float(torch.rand((), generator=generator)) - 1)
    size = columns_at_once(evidence, d)
    images = torch.cat([read_block(reader, probes, block, scale) for block in Y.split(size)], dim=1)
    return images @ Y, reader.v


class _Spread:
    """The mean of passes, and the standard error of that mean."""

    def __init__(self, W: Float[Tensor, "d d"], v: Float[Tensor, " d"]) -> None:
        self.count, self.mean_W, self.mean_v = 1, W, v
        self.squares = torch.zeros_like(W)

    def add(self, W: Float[Tensor, "d d"], v: Float[Tensor, " d"]) -> None:
        """One more pass (Welford's update: no difference of large sums)."""
        self.count += 1
        off = W - self.mean_W
        self.mean_W = self.mean_W + off / self.count
        self.mean_v = self.mean_v + (v - self.mean_v) / self.count
        self.squares = self.squares + off * (W - self.mean_W)

    @property
    def error(self) -> float:
        """The standard error of the mean of W, relative to it in the Frobenius norm."""
        size = float(self.mean_W.norm())
        if size == 0:
            return 0.0
        return math.sqrt(float(self.squares.sum()) / (self.count - 1) / self.count) / size
