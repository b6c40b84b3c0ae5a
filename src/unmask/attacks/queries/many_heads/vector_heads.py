"""Heads of a layer that answers with vectors: one query shows all heads at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import judge_heads, refuse
from unmask.attacks.queries.many_heads.head_values import totals
from unmask.attacks.queries.many_heads.heads_at_point import HeadsAtPoint, MoreHeadsThanWidth
from unmask.attacks.queries.many_heads.multi_head import MultiHeadAttack
from unmask.attacks.queries.opening import Layer, not_applicable, open_layer, silence
from unmask.attacks.queries.pairs import logit
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.queries.resolution import NoPlane
from unmask.attacks.run import Progress, silent
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_HIGHEST = 6.0  # scores beyond this are asked again at half the length


@dataclass(frozen=True)
class VectorHeadsAttack:
    """W_h and V_h of f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·V_hᵀ x_i with values in R^p.

        F(u, y) = Σ_h σ(uᵀW_h y)·V_hᵀu

    1. A random projection of the answers is a layer with numbers for answers: its heads at one y (`MultiHeadAttack`).
    2. V_h where head h is on and all others are off.
    3. With V known the H vectors V_hᵀu are independent, so that every answer gives all H shares σ by least squares,
       and d² queries give every W_h.

    Limits: H ≤ p and H ≤ d, with V_hᵀu independent for most u. No head with W = 0, no two with opposite W.
    Cost: d² + about 5·H·d + 150·H queries; the degrees of freedom are H·(d² + d·p), answers count p each.
    Source: our own; the paper treats numbers only (arXiv 2601.16873).
    """

    max_planes: int = 15
    seed: int = 0

    def __call__(
        self, evidence: OracleEvidence, progress: Progress = silent, profile: OracleProfile | None = None
    ) -> Recovery[HeadWeights]:
        """Learn the heads; `profile`, if the oracle was probed before."""
        run, heads = QueryRun(self.seed, progress, evidence=evidence), None
        try:
            profile = run.probe(profile)
            if not profile.num_outputs or profile.signs_only or not profile.is_linear:
                return refuse(run, Status.NOT_APPLICABLE, not_applicable(profile, "vectors"))
            layer = open_layer(run)
            if layer is None:
                return refuse(run, *silence(profile))
            seen = self._find_heads(run, layer)
            heads = _blank(layer, seen)
            _learn(run, layer, seen, heads)
            run.unknowns = heads.W.numel() + heads.v.numel()
            reason = f"{len(heads)} heads with answers in R^{profile.num_outputs}; heads with equal W are one."
            return judge_heads(run, heads, layer.pairs.boost, reason)
        except MoreHeadsThanWidth as ending:
            return refuse(run, Status.NOT_APPLICABLE, str(ending))
        except NoPlane as ending:
            return refuse(run, Status.NOTHING_FOUND, f"The heads could not be told apart: {ending}.")
        except BudgetSpent as ending:
            reason = f"The budget ended: {ending}. Columns of W that were not learned are NaN."
            return refuse(run, Status.BUDGET_EXHAUSTED, reason, heads)

    def _find_heads(self, run: QueryRun, layer: Layer) -> HeadsAtPoint:
        """The heads at one y, in a random projection of the answers."""
        direction = torch.randn(run.profile.num_outputs, generator=run.generator, dtype=torch.float64)
        seen = MultiHeadAttack(self.max_planes).view(run, layer.project(direction))
        if seen is None or seen.pairs.linear is not None or seen.units.has_clusters:
            raise NoPlane("a head has W = 0, or the W of two heads are multiples of each other")
        if len(seen.w) > run.profile.num_outputs:
            raise NoPlane(f"{len(seen.w)} heads cannot be told apart in answers of {run.profile.num_outputs} numbers")
        return seen


def _blank(layer: Layer, seen: HeadsAtPoint) -> HeadWeights:
    """V of every head, and W of which nothing is known yet."""
    num_heads, width = seen.w.shape
    W = torch.full((num_heads, width, width), torch.nan, dtype=torch.float64, device=seen.w.device)
    return HeadWeights(W=W, v=totals(layer.pairs, seen.y, seen.isolation))


def _learn(run: QueryRun, layer: Layer, seen: HeadsAtPoint, heads: HeadWeights) -> None:
    """Write all columns of every W into `heads`."""
    width = len(seen.y)
    Q = torch.linalg.qr(torch.randn(width, width, generator=run.generator, dtype=torch.float64)).Q.T.to(seen.w.device)
    unit = torch.eye(width, dtype=torch.float64, device=seen.w.device)
    length = width**0.5 / float(seen.w.norm(dim=1).max())
    for j in range(width):
        t = _scores(layer, heads, Q, unit[j], length)
        heads.W[:, :, j] = t.T @ Q
        length = width**0.5 / float(heads.W[:, :, : j + 1].norm(dim=1).max())
        run.progress("learning columns of W", j + 1, width)


def _scores(
    layer: Layer, heads: HeadWeights, Q: Float[Tensor, "q d"], y: Float[Tensor, " d"], length: float
) -> Float[Tensor, "q h"]:
    """qᵀW_h y of every head for each row of Q; rows at which a head saturates are asked again, shorter."""
    found = torch.full((len(Q), len(heads)), torch.nan, dtype=torch.float64, device=Q.device)
    todo = torch.arange(len(Q), device=Q.device)
    for _ in range(12):
        U = length * Q[todo]
        parts = torch.einsum("hdp,bd->bph", heads.v, U)
        shares = torch.linalg.lstsq(parts, layer.pairs(U, y)[:, :, None], driver="gels").solution[:, :, 0]
        t = logit(shares)
        good = (t.abs() < _HIGHEST).all(1)
        found[todo[good]] = t[good] / length
        todo, length = todo[~good], length / 2
        if len(todo) == 0:
            return found
    raise NoPlane("the shares of the heads do not explain the answers")
