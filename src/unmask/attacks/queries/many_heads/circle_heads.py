"""Any number of heads from tokens of bounded norm: heads at one y by their poles, then column by column."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from unmask.attacks.queries.claims import judge_heads, refuse
from unmask.attacks.queries.many_heads.circle_columns import CircleColumns, choose_probes
from unmask.attacks.queries.many_heads.circle_point import EvenPart, find_point, read_signs
from unmask.attacks.queries.opening import not_applicable, open_layer, silence
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.queries.resolution import NoPlane
from unmask.attacks.run import Progress, silent
from unmask.errors import InputError
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.heads import HeadWeights, canonical_heads
from unmask.recovery import Recovery, Status

_EXACT = 1e-12  # errors of answers above this are worth a second pass
_MORE = 1.3  # queries for each unknown
_PART = 3e-2  # of a head's v: what is less of it is none, where signs are told by two copies


@dataclass(frozen=True)
class CircleHeadsAttack:
    """Heads in general, from tokens that may not be long enough to turn heads off.

        G(u, y) = ½ Σ_h (v_hᵀu)·tanh(uᵀW_h y/2)

    1. On a circle of u, G is meromorphic in the angle, with one ladder of poles a head beside the circle. The poles
       give the number of heads and start a fit (`fit_circle`).
    2. Offsets from the circle give v_h and W_h y in all directions (`find_point`).
    3. W_h(y + δ·p_j) by least squares from W_h y, at points where every head is between on and off and v_hᵀu is
       large; so the columns of W_h.
    4. Signs: Σ_h v_h is known, and is Σ_h ±v_h for one choice of signs. Where it is not, two copies of the first
       token tell W from −W and W = 0, by linear least squares in v⁺, v⁻ and v⁰.

    Notation: p_j orthonormal, p_0 = y. With `passes` = 2 columns are measured again at y + p_j, from what is known,
    which takes the factor 1/δ back, and all is fitted together; None: where the oracle's errors ask for it.
    Limits: scores on the circle must reach about 5, else poles are too far away: norms of about √d for weights of the
    usual size. Heads crowd the circle: 8 were found in exact answers at widths of 16 to 64, 16 were not. Added errors
    hide poles, so that fewer heads are found in them (benchmarks/run.py paper queries).
    Cost: 1.3·H·d² + 6·H·d + 50·d + 250 learning queries, or a plane or two more; twice that with a second pass.
    Source: ours.
    """

    passes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the number of passes."""
        if self.passes not in (None, 1, 2):
            raise InputError(f"passes must be 1 or 2, got {self.passes}; a third would measure the same again")

    def __call__(
        self, evidence: OracleEvidence, progress: Progress = silent, profile: OracleProfile | None = None
    ) -> Recovery[HeadWeights]:
        """Learn the heads; `profile`, if the oracle was probed before."""
        run = QueryRun(self.seed, progress, evidence=evidence)
        try:
            profile = run.probe(profile)
            if profile.num_outputs or profile.signs_only or not profile.is_linear or evidence.width < 2:
                return refuse(run, Status.NOT_APPLICABLE, not_applicable(profile, "numbers for two entries or more"))
            layer = open_layer(run)
            if layer is None:
                return refuse(run, *silence(profile))
            even = EvenPart(layer.pairs, profile)
            point = find_point(even, even.longest(run.generator), run.generator)
            run.unknowns = len(point.v) * evidence.width * (evidence.width + 1)
            columns, v = CircleColumns(even, point, run), point.v
            columns.learn()
            is_exact = max(profile.precision, profile.absolute_error) <= _EXACT
            if self.passes == 2 or (self.passes is None and not is_exact):
                columns.learn_again()
                v = columns.refine_together()
            heads = tell_signs(run, even, HeadWeights(W=columns.W, v=v), point.longest)
        except NoPlane as ending:
            return refuse(run, Status.NOTHING_FOUND, f"The heads could not be told apart: {ending}.")
        except BudgetSpent as ending:
            return refuse(run, Status.BUDGET_EXHAUSTED, f"The budget ended: {ending}.")
        reason = (
            f"{len(heads)} heads in canonical form, from the poles of the answers beside a circle of tokens; heads "
            "with equal W are one, and heads with v = 0 are not seen."
        )
        try:
            return judge_heads(run, heads, layer.pairs.boost, reason)
        except BudgetSpent as ending:
            return refuse(run, Status.BUDGET_EXHAUSTED, f"No certificate: {ending}.")


def tell_signs(run: QueryRun, even: EvenPart, heads: HeadWeights, longest: float) -> HeadWeights:
    """Each head as (W, v) or (−W, −v); pairs W, −W and W = 0 where these do not add up to Σ_h v_h."""
    signs = read_signs(heads.v, even.pairs.sum_v)
    if signs is not None:
        return HeadWeights(W=signs[:, None, None] * heads.W, v=signs[:, None] * heads.v)
    return _tell_by_copies(run, even, heads, longest)


def _tell_by_copies(run: QueryRun, even: EvenPart, heads: HeadWeights, longest: float) -> HeadWeights:
    """v⁺, v⁻ and v⁰ of the heads W, −W and 0, from two copies of the first token.

        F = Σ_h (v⁺_hᵀu)·σ(t_h + log 2) + (v⁻_hᵀu)·σ(−t_h + log 2) + ⅔·v⁰ᵀu,    v⁺_h − v⁻_h known

    Cost: 1.3·(H + 1)·d queries.
    """
    width = heads.v.shape[1]
    drawn = torch.randn(width, generator=run.generator, dtype=torch.float64)
    y = (drawn / drawn.norm()).to(heads.v)
    w = heads.W @ y
    num = int(_MORE * (len(heads) + 1) * width) + 16
    U = choose_probes(run, w, min(longest, 0.99 * even.pairs.farthest(y)), num)
    t, shift = U @ w.T, math.log(2)
    up, down = torch.sigmoid(t + shift), torch.sigmoid(shift - t)
    values = even.pairs(U, y, copies=2) - ((U @ heads.v.T) * up).sum(1)
    rows = torch.cat([((up + down)[:, :, None] * U[:, None]).flatten(1), 2 / 3 * U], dim=1)
    found = torch.linalg.lstsq(rows, values[:, None], driver="gelsd").solution[:, 0].reshape(-1, width)
    minus, still = found[:-1], found[-1]
    size = float(heads.v.norm(dim=1).max())
    minus = torch.where(minus.norm(dim=1, keepdim=True) < _PART * heads.v.norm(dim=1, keepdim=True), 0.0, minus)
    v, W = torch.cat([heads.v + minus, minus]), torch.cat([heads.W, -heads.W])
    is_there = torch.cat([v[: len(heads)].norm(dim=1) > _PART * heads.v.norm(dim=1), minus.norm(dim=1) > 0])
    v, W = v[is_there], W[is_there]
    if float(still.norm()) > _PART * size:
        v, W = torch.cat([v, still[None]]), torch.cat([W, torch.zeros_like(W[:1])])
    return canonical_heads(HeadWeights(W=W, v=v))
