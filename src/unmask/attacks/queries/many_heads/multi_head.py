"""Any number of heads, of any rank, from sequences of two tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import AMPLIFICATION, judge_heads, refuse
from unmask.attacks.queries.many_heads.columns import Columns
from unmask.attacks.queries.many_heads.head_values import all_off, gradient
from unmask.attacks.queries.many_heads.heads_at_point import HeadsAtPoint, MoreHeadsThanWidth, find_heads
from unmask.attacks.queries.many_heads.isolation import CLUSTER_LOSS, Isolation
from unmask.attacks.queries.opening import Layer, not_applicable, open_layer, silence
from unmask.attacks.queries.pairs import Pairs
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.queries.resolution import NoPlane
from unmask.attacks.run import Progress, silent
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.heads import HeadWeights, canonical_heads
from unmask.recovery import Recovery, Status


@dataclass(frozen=True)
class MultiHeadAttack:
    """Heads in general: none of them orthogonal, low in rank or known in number.

        f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·v_hᵀ x_i

    1. At a random y, a circle of first tokens far out crosses the border of every head once: number, v_h, W_h y.
    2. With W_h y known, a point turns all heads off but one; there F = v_hᵀu·σ(uᵀW_h y) is read to the last digit.
    3. Small steps of y keep others off: the columns of W_h, each checked by predictions; once the columns' rank is
       seen, only their span is probed.

    Notation: h heads, d the width, r the rank of a head; degrees of freedom h·(d² + d), or h·(r·(2d − r) + d).
    Limits: the canonical form is returned, as no query tells more: equal W are merged, v = 0 is not seen. Heads whose
    W are positive multiples of one another are told apart by repeated tokens, up to three of them; opposite W and
    W = 0 by two copies of a token. At most d heads; tokens must be as long as gating needs.
    Cost: 1.02 to 1.15 times the degrees of freedom at full rank from d = 64 on, up to 1.9 at low rank and for trained
    heads; twice that with `polish`, for a digit, which is also tried where the certificate fails.
    Source: our own. arXiv 2601.16873 leaves it open (§7). arXiv 2608.03294 repeats tokens: 4hd² − 2h + 1 queries of
    length up to 2h + 1 in exact arithmetic, with a condition number that grows about 10³ a head.
    """

    max_planes: int = 15
    polish: bool = False
    seed: int = 0

    def __call__(
        self, evidence: OracleEvidence, progress: Progress = silent, profile: OracleProfile | None = None
    ) -> Recovery[HeadWeights]:
        """Learn the heads; `profile`, if the oracle was probed before."""
        run, columns, recovery = QueryRun(self.seed, progress, evidence=evidence), None, None
        try:
            profile = run.probe(profile)
            if profile.num_outputs or profile.signs_only or not profile.is_linear:
                return refuse(run, Status.NOT_APPLICABLE, not_applicable(profile, "numbers"))
            layer = open_layer(run)
            if layer is None:
                return refuse(run, *silence(profile))
            seen = self.view(run, layer)
            if seen is None:
                return judge_heads(run, _still(layer), layer.pairs.boost, _STILL)
            columns = Columns(seen, run)
            columns.learn()
            recovery = self._judge(run, layer, columns)
            if self.polish or not recovery.certificate.holds:
                columns.polish()
                again = self._judge(run, layer, columns)
                recovery = min(again, recovery, key=lambda each: each.certificate.residual)
            return recovery
        except MoreHeadsThanWidth as ending:
            return refuse(run, Status.NOT_APPLICABLE, str(ending))
        except NoPlane as ending:
            return refuse(run, Status.NOTHING_FOUND, f"The heads could not be told apart: {ending}.")
        except BudgetSpent as ending:
            if recovery is not None and recovery.certificate.holds:  # a second measurement was only for a digit
                return recovery
            return _report_unfinished(run, columns, ending)

    def _judge(self, run: QueryRun, layer: Layer, columns: Columns) -> Recovery[HeadWeights]:
        heads = split_heads(columns)
        run.unknowns = _unknowns(columns, heads)
        amplification = AMPLIFICATION * CLUSTER_LOSS ** (columns.view.units.v.shape[1] - 1)
        reason = _describe_learned(columns, heads)
        return judge_heads(run, heads, layer.pairs.boost, reason, amplification)

    def view(self, run: QueryRun, layer: Layer) -> HeadsAtPoint | None:
        """The heads at the first random y that shows them all."""
        width = len(layer.pairs.sum_v)
        unit = torch.eye(1, width, dtype=torch.float64)[0]
        for resolution in layer.resolutions:
            for plane in range(self.max_planes):
                run.progress("looking for heads", plane, self.max_planes)
                aside = torch.randn(width, generator=run.generator, dtype=torch.float64)
                aside[0] = 0
                y = unit if width == 1 else (unit + aside / aside.norm()) / math.sqrt(2)
                try:
                    return find_heads(layer.pairs, y.to(layer.pairs.sum_v.device), resolution, run.generator)
                except NoPlane as ending:
                    last = ending
        raise NoPlane(f"{last}, in {self.max_planes} random planes")


def _still(layer: Layer) -> HeadWeights:
    """One head with W = 0."""
    v = layer.pairs.sum_v[None]
    return HeadWeights(W=v.new_zeros(1, v.shape[1], v.shape[1]), v=v)


def split_heads(columns: Columns) -> HeadWeights:
    """The heads of all units in canonical form."""
    view, W = columns.view, columns.W
    if view.pairs.linear is None:
        return canonical_heads(_members(columns), _same(view))
    plus, minus, still = split_signs(view.pairs, view.y, view.isolation)
    v = torch.cat([plus, minus, still[None]])
    W = torch.cat([W, -W, torch.zeros_like(W[:1])])
    is_there = v.norm(dim=1) > _same(view) * float(v.norm(dim=1).max())
    return canonical_heads(HeadWeights(W=W[is_there], v=v[is_there]), _same(view))


def _members(columns: Columns) -> HeadWeights:
    """The heads of all units, with the signs that two tokens show; unknown columns are NaN."""
    units = columns.view.units
    scaled = units.slopes[:, :, None, None] * columns.W[:, None]
    present = units.v.norm(dim=2) > 0
    return HeadWeights(W=scaled[present], v=units.v[present])


def _same(view: HeadsAtPoint) -> float:
    """What precision leaves of equal heads, or of v = 0; relative."""
    return 1e3 * view.isolation.resolution.precision


_STILL = "No head turns on or off, however long a token is: W = 0, and answers are means of vᵀx."


def _report_unfinished(run: QueryRun, columns: Columns | None, ending: BudgetSpent) -> Recovery[HeadWeights]:
    """What is known when the budget ends: whole columns of W and v of every unit, or nothing."""
    if columns is None:
        reason = f"The budget ended before heads were told apart: {ending}."
        return refuse(run, Status.BUDGET_EXHAUSTED, reason)
    if columns.view.pairs.linear is not None:
        reason = f"The budget ended before the signs of heads were told, which is done last: {ending}."
        return refuse(run, Status.BUDGET_EXHAUSTED, reason)
    heads, known = _members(columns), int(columns.W[0, 0].isfinite().sum())
    reason = (
        f"The budget ended: {ending}. Known are v of {len(heads)} heads and {known} of {run.evidence.width} columns of "
        "each W; the rest is NaN."
    )
    return refuse(run, Status.BUDGET_EXHAUSTED, reason, heads)


def _unknowns(columns: Columns, heads: HeadWeights) -> int:
    """Degrees of freedom: r·(2d − r) of every W that is no multiple of another, and d of every v."""
    width = heads.v.shape[1]
    return sum(rank * (2 * width - rank) for rank in columns.ranks) + len(heads) * width


def _describe_learned(columns: Columns, heads: HeadWeights) -> str:
    width, ranks = heads.v.shape[1], columns.ranks
    low = f" of rank {min(ranks)} to {max(ranks)}" if ranks and min(ranks) < width else ""
    return (
        f"{len(heads)} heads{low} in canonical form: heads with equal W are one, with the sum of their v, and heads "
        "with v = 0 are not seen; no query can tell more."
    )


_NOTHING = 1e-2  # of v⁺ − v⁻: a part below this is none; gradients at a score are read to 10⁻¹¹, in float32 to 10⁻³
_SCORE = -0.5  # where the shares of (W, v) and (−W, −v) with two copies differ most, nearly


def split_signs(
    pairs: Pairs, y: Float[Tensor, " d"], isolation: Isolation
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k d"], Float[Tensor, " d"]]:
    """v of the heads W_k, of the heads −W_k, and of a head with W = 0.

        v⁺·σ(t) + v⁻·σ(−t) = v⁻ + (v⁺ − v⁻)·σ(t)

    is one head and a linear term for two tokens. With two copies of the first, scores grow by log 2:

        v⁺·σ(t + log 2) + v⁻·(σ(−t + log 2) − 1) = J·σ(t + log 2) + v⁻·(σ(t + log 2) − σ(t − log 2))

    Notation: J = v⁺ − v⁻, what two tokens show of a unit; e = Σ_k v⁻_k + v⁰/2 their linear term; v⁰ that of W = 0,
    whose share is 1/2 with one copy and 2/3 with two.
    Limits: units of one head only.
    Cost: (units + 1)·width queries.
    """
    bare = replace(pairs, linear=None)
    once, twice = (all_off(bare, y, isolation, copies) for copies in (1, 2))
    still = 6 * (twice - once)
    total = isolation.units.total
    minus = torch.zeros_like(total)
    up, down = (1 / (1 + math.exp(-_SCORE - shift)) for shift in (math.log(2), -math.log(2)))
    for k in range(len(isolation.w)):
        seen = gradient(replace(pairs, linear=twice), y, isolation, k, _SCORE, copies=2)
        minus[k] = (seen - total[k] * up) / (up - down)
    size = total.norm(dim=1)
    is_plain = minus.norm(dim=1) < _NOTHING * size
    is_turned = (minus + total).norm(dim=1) < _NOTHING * size
    minus = torch.where(is_turned[:, None], -total, torch.where(is_plain[:, None], 0.0, minus))
    is_pair = ~is_plain & ~is_turned
    if int(is_pair.sum()) == 1:  # what is left of the linear term has more digits than a gradient at a score
        minus[is_pair] = once - still / 2 - minus[~is_pair].sum(0)
    return total + minus, minus, still
