"""The front door of queries → weights: the oracle is probed, and the attack that fits its answers is run."""

from __future__ import annotations

from dataclasses import replace
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
from unmask.attacks.queries.verdict import fresh_sequences, no_heads, refused, started
from unmask.evidence.ledger import BudgetSpent, Ledger
from unmask.evidence.oracles import Oracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery, Status

_NUM_NEW = 4  # questions to a service whose answers were kept from an earlier run
_ADDED = 20  # times what the oracle adds to an answer
_CHANGED = 0.1  # of an answer: another layer is off by the order of one


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
    a single head that answers with numbers is read with averaged passes, and up to three by repeated tokens. Where the
    ledger was used before, a few new questions tell whether it is still the same layer.
    """
    before, is_resumed = evidence.ledger.num_asked - (profile.num_queries if profile else 0), evidence.ledger.was_used
    bill = started(evidence, 0)
    try:
        profile = profile or probe_oracle(evidence, torch.Generator().manual_seed(seed))
    except BudgetSpent as ending:
        reason = f"The budget ended while the oracle was probed: {ending}."
        return refused(evidence, bill, Status.BUDGET_EXHAUSTED, reason)
    recovery = _recovered(evidence, profile, progress, seed)
    if is_resumed and recovery.status is Status.RECOVERED:
        recovery = _still_there(evidence, profile, recovery)
    cost = replace(recovery.cost, queries=evidence.ledger.num_asked - before)  # those of attacks that failed included
    return replace(recovery, cost=cost)


def _recovered(
    evidence: OracleEvidence, profile: OracleProfile, progress: Progress, seed: int
) -> Recovery[HeadWeights]:
    """The recovery of the attack that fits."""
    if profile.signs_only:
        return MembershipAttack(seed=seed)(evidence, progress)
    if profile.num_outputs:
        return VectorHeadsAttack(seed=seed)(evidence, progress, profile)
    one_head = NoisyAttack(seed=seed) if profile.absolute_error else SingleHeadAttack(seed)
    if evidence.width == 1:
        return one_head(evidence, progress)
    recovery = MultiHeadAttack(seed=seed)(evidence, progress, profile)
    if recovery.status is not Status.NOTHING_FOUND or profile.max_norm == float("inf"):
        return recovery
    for attack in (one_head, RepetitionAttack(seed=seed)):
        recovery = attack(evidence, progress)
        if recovery.status.conclusive or recovery.status is Status.BUDGET_EXHAUSTED:
            break
    return recovery


def _still_there(
    evidence: OracleEvidence, profile: OracleProfile, recovery: Recovery[HeadWeights]
) -> Recovery[HeadWeights]:
    """Ask a used ledger's service a few new questions: the answers that were kept may be those of another layer.

    Limits: tells nothing where what the oracle adds is larger than its answers, or where the budget has no room.
    """
    heads, generator = recovery.value, torch.Generator().manual_seed(len(evidence.ledger))
    new = fresh_sequences(heads, 1.0, min(profile.max_norm, 1e12), generator)[:_NUM_NEW]
    try:
        answers = evidence.ask(new)
    except BudgetSpent:
        return recovery
    expected = heads(new).sign() if profile.signs_only else heads(new)
    size = max(float(answers.square().mean().sqrt()), float(expected.square().mean().sqrt()))
    off = float((answers - expected).abs().max()) / size
    if off <= max(_CHANGED, 10 * recovery.certificate.tolerance, _ADDED * profile.absolute_error / size):
        return recovery
    reason = (
        f"The ledger holds the answers of another layer: {_NUM_NEW} new questions are answered otherwise now, by "
        f"{off:.1e} of an answer. Name another ledger."
    )
    return replace(recovery, value=no_heads(evidence), status=Status.NOTHING_FOUND, reason=reason)
