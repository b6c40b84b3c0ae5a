"""What a learner may claim: its weights are asked against the oracle on sequences that it never used."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.evidence.oracles import Answers, OracleEvidence, Sequences
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Certificate, Recovery, Status

NUM_FRESH = 48
FRESH_LENGTH = 6
# Learning amplifies an oracle's error: isolated heads by 10³ at 8 heads, 10⁴ at 32 (benchmarks/run.py queries). A head
# that is missed shows at its share of the answers. Between the two lies what is allowed.
AMPLIFICATION = 1e4
_OWN = 20  # times the oracle's error: the largest of 48 answers is off by three deviations, and weights by more
_MISSED = 0.3  # of an answer, what noise may excuse at most: beyond it, it would excuse a missed head as well
_SHOWS = 2.0  # times the tolerance, at least: what W = 0 must be off by, or fresh sequences say nothing about W
_CLOSE_ENOUGH = 1e-8  # of an answer: whatever the oracle's precision, nobody agrees to eight digits by chance
_LOOSEST = 1e-2  # what amplified noise may excuse, unless the noise alone is larger


def fresh_sequences(
    heads: HeadWeights, boost: float, max_norm: float, generator: torch.Generator
) -> Float[Tensor, "b n d"]:
    """Random sequences on which every head's scores are of the order of one, in turn.

    With `boost` R the asking token is divided by R and the others are multiplied by it, which leaves scores alone and
    lets answers stand out from what is added to them.
    """
    width = heads.v.shape[1]
    X = torch.randn(NUM_FRESH, FRESH_LENGTH, width, generator=generator, dtype=torch.float64).to(heads.W.device)
    sizes = torch.linalg.matrix_norm(heads.W).clamp_min(1e-30) / width  # the score of two random unit tokens
    turn = torch.arange(NUM_FRESH, device=X.device) % max(1, len(heads))
    norm = (2 / sizes[turn]).sqrt() if len(heads) else torch.ones(NUM_FRESH, device=X.device, dtype=X.dtype)
    boost = max(1.0, min(boost, max_norm / float(norm.max())))
    X = X / X.norm(dim=2, keepdim=True) * norm.clamp(max=max_norm / boost)[:, None, None]
    return torch.cat([X[:, :-1] * boost, X[:, -1:] / boost], dim=1)


def certify(
    evidence: OracleEvidence,
    profile: OracleProfile,
    learned: Callable[[Sequences], Answers],
    fresh: Sequences,
    what: str,
    amplification: float = AMPLIFICATION,
    blind: Callable[[Sequences], Answers] | None = None,
) -> Certificate:
    """The error on fresh sequences, against what the oracle's own error explains.

        residual = max |f − f̂| / rms f,    tolerance = max(A·(ε + τ/rms f), 10⁻⁸)

    Notation: f the oracle, f̂ what was learned; ε the precision of its arithmetic, τ what it adds to answers; A the
    amplification by learning, cut where it would excuse more than a hundredth of an answer. 20 times ε + τ/rms f are
    always allowed, up to 0.3. `blind` is the same without what is at stake; its error is `rejected`.
    """
    answers = evidence.ask(fresh)
    size = float(answers.square().mean().sqrt())
    if size == 0:
        return Certificate.none("The oracle answers 0 to everything, so there is nothing to compare with.")
    own = profile.precision + profile.absolute_error / size
    residual = float((answers - learned(fresh)).abs().max()) / size
    tolerance = max(min(_OWN * own, _MISSED), min(amplification * own, _LOOSEST), _CLOSE_ENOUGH)
    claim = f"{what} {len(fresh)} fresh random sequences of {fresh.shape[1]} tokens are answered as the oracle does."
    rejected = float((answers - blind(fresh)).abs().max()) / size if blind is not None else None
    return Certificate(claim, residual, tolerance, rejected, {"oracle_error": own})


def judge_heads(
    run: QueryRun, heads: HeadWeights, boost: float, reason: str, amplification: float = AMPLIFICATION
) -> Recovery[HeadWeights]:
    """The recovery of heads that were learned whole: certified on fresh sequences, or withdrawn."""
    fresh = fresh_sequences(heads, boost, min(run.profile.max_norm, 1e12), run.generator)
    certificate = certify_heads(run, heads, fresh, amplification)
    return conclude(run, heads, certificate, len(fresh), reason)


def certify_heads(
    run: QueryRun, heads: HeadWeights, fresh: Sequences, amplification: float = AMPLIFICATION
) -> Certificate:
    """`certify`, with the error of the same heads at W = 0 as what is refused: answers must depend on W."""
    blind = HeadWeights(W=torch.zeros_like(heads.W), v=heads.v) if heads.W.any() else None
    return certify(run.evidence, run.profile, heads, fresh, "With these weights", amplification, blind)


def conclude(
    run: QueryRun, heads: HeadWeights, certificate: Certificate, num_fresh: int, reason: str
) -> Recovery[HeadWeights]:
    """The recovery that the certificate allows: the heads, or none."""
    certificate, cost = run.charge(certificate, num_fresh)
    if certificate.rejected is not None and certificate.rejected < _SHOWS * certificate.tolerance:
        why = (
            f"{reason} But W = 0 would answer fresh sequences nearly as well: it is off by {certificate.rejected:.1e} "
            f"of an answer, where {certificate.tolerance:.1e} is explained. Tokens may not be so long that W shows."
        )
        return Recovery(no_heads(run.evidence), Status.NOTHING_FOUND, why, certificate, cost)
    if certificate.holds:
        return Recovery(heads, Status.RECOVERED, reason, certificate, cost, ("answers",))
    why = (
        f"{reason} But on fresh sequences these weights are off by {certificate.residual:.1e} of an answer, where "
        f"{certificate.tolerance:.1e} is explained: it is not a layer of this form, or a head was missed."
    )
    return Recovery(no_heads(run.evidence), Status.NOTHING_FOUND, why, certificate, cost)


def refuse(run: QueryRun, status: Status, reason: str, heads: HeadWeights | None = None) -> Recovery[HeadWeights]:
    """Nothing can be claimed; or, with `heads`, a part that was certain when the budget ended (unknown entries NaN)."""
    certificate, cost = run.charge(Certificate.none(reason), 0)
    return Recovery(heads or no_heads(run.evidence), status, reason, certificate, cost)


def no_heads(evidence: OracleEvidence) -> HeadWeights:
    """A layer of which nothing is known."""
    empty = torch.zeros(0, evidence.width, dtype=torch.float64, device=evidence.device)
    return HeadWeights(W=empty[:, :, None].expand(-1, -1, evidence.width), v=empty)


def is_zero(sum_v: Float[Tensor, "d *p"], profile: OracleProfile) -> bool:
    """Whether answers to unit tokens are all zero, up to the oracle's own error."""
    noise = 5 * profile.absolute_error
    return float(sum_v.abs().max()) <= max(noise, math.ulp(0.0))
