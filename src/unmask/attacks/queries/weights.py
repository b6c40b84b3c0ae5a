"""The front door of queries → weights: the oracle is probed, and the attack that fits its answers is run."""

from __future__ import annotations

from pathlib import Path

import torch

from unmask.attacks.progress import Progress, silent
from unmask.attacks.queries.membership import MembershipAttack
from unmask.attacks.queries.multi_head import MultiHeadAttack
from unmask.attacks.queries.noisy import NoisyAttack
from unmask.attacks.queries.profile import OracleProfile, probe_oracle
from unmask.attacks.queries.repetition import RepetitionAttack
from unmask.attacks.queries.single_head import SingleHeadAttack
from unmask.attacks.queries.vector_heads import VectorHeadsAttack
from unmask.attacks.queries.verdict import refused, started
from unmask.evidence.ledger import BudgetSpent, Ledger
from unmask.evidence.oracles import Oracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status


def recover_weights(
    oracle: Oracle,
    *,
    width: int,
    ledger: str | Path | None = None,
    budget: int | None = None,
    max_norm: float | None = None,
    progress: Progress = silent,
    seed: int = 0,
) -> Recovery[HeadWeights]:
    """The heads of an attention layer that may only be asked: `recovery.value.W` (H, d, d), `.v` (H, d).

    `ledger` is a file that keeps every answer, so that a killed run goes on where it was and pays nothing twice;
    `budget` the number of answers that may be paid for; `max_norm` a bound on tokens, if one is known.
    """
    book = Ledger(ledger, budget=budget, about=f"{oracle.name}, tokens of {width}")
    try:
        return recover_from_answers(OracleEvidence(oracle, width, book, max_norm), progress=progress, seed=seed)
    finally:
        book.close()


def recover_from_answers(
    evidence: OracleEvidence, *, profile: OracleProfile | None = None, progress: Progress = silent, seed: int = 0
) -> Recovery[HeadWeights]:
    """The same, of evidence; with a `profile` if the oracle was probed before.

    Signs go to bisection, vectors and numbers to gating and isolation. Where tokens may not be as long as these need,
    a single head is read with averaged passes, and up to three by repeated tokens.
    """
    try:
        profile = profile or probe_oracle(evidence, torch.Generator().manual_seed(seed))
    except BudgetSpent as ending:
        reason = f"The budget ended while the oracle was probed: {ending}."
        return refused(evidence, started(evidence, 0), Status.BUDGET_EXHAUSTED, reason)
    if profile.signs_only:
        return MembershipAttack(seed=seed)(evidence, progress)
    if profile.num_outputs:
        return VectorHeadsAttack(seed=seed)(evidence, progress, profile)
    recovery = MultiHeadAttack(seed=seed)(evidence, progress, profile)
    if recovery.status is not Status.NOTHING_FOUND or profile.max_norm == float("inf"):
        return recovery
    one_head = NoisyAttack(seed=seed) if profile.absolute_error else SingleHeadAttack(seed)
    for attack in (one_head, RepetitionAttack(seed=seed)):
        further = attack(evidence, progress)
        if further.status.conclusive or further.status is Status.BUDGET_EXHAUSTED:
            return further
    return further
