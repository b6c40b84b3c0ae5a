"""The paper's way around a network behind the heads: g(X) = f(X) − f(−X) is an attention layer without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from unmask.attacks.queries.claims import refuse
from unmask.attacks.queries.one_head.single_head import SingleHeadAttack
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import Answers, OracleEvidence, Sequences
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_NUM_DIRECTIONS = 16
_EVEN = 1e3  # times the precision: what two halves of a sum in another order differ by, with a reserve


@dataclass(frozen=True, eq=False)
class AntisymmetricOracle:
    """f(X) − f(−X), which for f a ReLU network without biases behind heads is a layer of heads alone.

        g(X) = f(X) − f(−X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·(V_hᵀℓ)ᵀ x_i

    Scores are the same for X and −X, and relu(z) − relu(−z) = z, so the network becomes its linear part ℓ.
    Notation: V_h the value matrices, ℓ = Σ_j a_j·b_j. Both questions are asked of, and paid by, `evidence`.
    Source: arXiv 2601.16873, §4.1.
    """

    evidence: OracleEvidence
    name: str = "f(X) - f(-X)"

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """All differences at once."""
        there, back = self.evidence.ask(torch.cat([sequences, -sequences])).chunk(2)
        yield list(range(len(sequences))), there - back


def antisymmetric_evidence(evidence: OracleEvidence) -> OracleEvidence:
    """The same layer without its network; budget and answers stay with `evidence`."""
    return OracleEvidence(
        AntisymmetricOracle(evidence), evidence.width, max_norm=evidence.max_norm, device=evidence.device
    )


def is_even(evidence: OracleEvidence, precision: float, generator: torch.Generator) -> bool:
    """Whether f([x]) = f([−x]), so that nothing is left of it in g. Cost: 32 queries."""
    tokens = torch.randn(_NUM_DIRECTIONS, 1, evidence.width, generator=generator, dtype=torch.float64)
    there, back = evidence.ask(torch.cat([tokens, -tokens])).chunk(2)
    return float((there - back).abs().max()) <= _EVEN * precision * float(there.abs().max())


def antisymmetric(evidence: OracleEvidence, seed: int = 0, progress: Progress = silent) -> Recovery[HeadWeights]:
    """W of one head under a ReLU network without biases, as the paper learns it: the value's v is Vᵀℓ.

    Limits: ℓ ≠ 0. An even network, such as one that makes |bᵀx| of two neurons, has ℓ = 0 and is refused.
    Cost: 2·(d² + d) queries, and about 110 for probing.
    Source: arXiv 2601.16873, §4.1. `homogeneous.py` needs half of it and no ℓ.
    """
    run = QueryRun(seed, progress, evidence=evidence, unknowns=evidence.width**2 + evidence.width)
    try:
        profile = run.probe()
        has_none = is_even(evidence, profile.precision, run.generator)
    except BudgetSpent as spent:
        return refuse(run, Status.BUDGET_EXHAUSTED, f"The budget ended before W was asked for: {spent}.")
    if has_none:
        why = "The oracle answers to −x as to x: the network's linear part is 0, and g(X) = f(X) − f(−X) with it."
        return refuse(run, Status.NOT_IDENTIFIABLE, why)
    found = SingleHeadAttack(seed)(antisymmetric_evidence(evidence), progress)
    return replace(found, cost=replace(found.cost, queries=run.num_asked))
