"""What a learner may claim: its weights are asked against the oracle on sequences that it never used.

1. Fresh sequences must be answered as the oracle does, up to what learning makes of its error (`certify`).
2. Where they are off by more than the oracle's error alone, learning was inexact or a head was missed: the same number
   of heads, fitted anew in a small subspace, must leave nothing but the oracle's error (`look_for_missed_heads`).
3. A head counts only if its share of the answers is far above what fresh sequences are off by.
4. A layer counts as a whole only if sequences of other lengths, and tokens of ordinary norm, are answered likewise
   (`fresh.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.fresh import check_lengths, check_ordinary, fresh_sequences
from unmask.attacks.queries.missed_heads import look_for_missed_heads
from unmask.attacks.queries.profile import OracleProfile
from unmask.attacks.queries.query_run import QueryRun
from unmask.evidence.oracles import Answers, OracleEvidence, Sequences
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of

# Learning amplifies an oracle's error: isolated heads by 10³ at 8 heads, 10⁴ at 32 (benchmarks/run.py queries). A head
# that is missed shows at its share of the answers. Between the two lies what is allowed.
AMPLIFICATION = 1e4
_OWN = 20  # times the oracle's error: the largest of 48 answers is off by three deviations, and weights by more
_MISSED = 0.3  # of an answer, what noise may excuse at most: beyond it, it would excuse a missed head as well
_SHOWS = 2.0  # times the tolerance, at least: what W = 0 must be off by, or fresh sequences say nothing about W
_UNEXPLAINED = 4.0  # times the oracle's error: the largest of 48 answers is off by three deviations
_CLEAR = 5.0  # times what is beyond the oracle's error: a head's share, or a fifth of its W may be wrong
_UNSURE = 1.3  # times the oracle's error: six repetitions tell it to about 30 %
_STEP = 1e-3  # of W, for a difference quotient
_CHANCE = 2.0  # times the oracle's error: the largest of 48 answers is off by more without any error of the weights
_NEGLIGIBLE = 1e-12  # of an answer: a head so small is not looked for
_CLOSE_ENOUGH = 1e-8  # of an answer: whatever the oracle's precision, nobody agrees to eight digits by chance
_LOOSEST = 1e-2  # what amplified noise may excuse, unless the noise alone is larger


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
    off = (answers - learned(fresh)).abs() / size
    residual = float(off.max())
    tolerance = max(min(_OWN * own, _MISSED), min(amplification * own, _LOOSEST), _CLOSE_ENOUGH)
    claim = f"{what} {len(fresh)} fresh random sequences of {fresh.shape[1]} tokens are answered as the oracle does."
    rejected = float((answers - blind(fresh)).abs().max()) / size if blind is not None else None
    details = {"oracle_error": own, "rms_residual": float(off.square().mean().sqrt())}
    return Certificate(claim, residual, tolerance, rejected, details)


def judge_heads(
    run: QueryRun, heads: HeadWeights, boost: float, reason: str, amplification: float = AMPLIFICATION
) -> Recovery[HeadWeights]:
    """The recovery of heads that were learned whole: certified on fresh sequences, or withdrawn."""
    fresh = fresh_sequences(heads, boost, min(run.profile.max_norm, 1e12), run.generator)
    certificate = certify_heads(run, heads, fresh, amplification)
    return conclude(run, heads, certificate, fresh, boost, reason)


def certify_heads(
    run: QueryRun, heads: HeadWeights, fresh: Sequences, amplification: float = AMPLIFICATION
) -> Certificate:
    """`certify`, with the error of the same heads at W = 0 as what is refused: answers must depend on W.

    The details hold the `lasting_error` of W that fresh sequences show and averaging does not take away.
    """
    blind = HeadWeights(W=torch.zeros_like(heads.W), v=heads.v) if heads.W.any() else None
    certificate = certify(run.evidence, run.profile, heads, fresh, "With these weights", amplification, blind)
    details = {**certificate.details, "lasting_error": _lasting_error(certificate, heads, fresh)}
    return replace(certificate, details=details)


def _lasting_error(certificate: Certificate, heads: HeadWeights, fresh: Sequences) -> float:
    """The relative error of W that fresh sequences show beyond the oracle's own.

    √(rms² − (1.3·own)²)/s,    s = rms ∂f̂((1 + ε)·W)/∂ε, of an answer
    """
    answers, longer = heads(fresh), HeadWeights(W=(1 + _STEP) * heads.W, v=heads.v)(fresh)
    slope = float((longer - answers).norm()) / _STEP / max(float(answers.norm()), 1e-300)
    rms, own = (certificate.details.get(name, 0.0) for name in ("rms_residual", "oracle_error"))
    return math.sqrt(max(0.0, rms**2 - (_UNSURE * own) ** 2)) / slope if slope and rms > _NEGLIGIBLE else 0.0


def conclude(
    run: QueryRun, heads: HeadWeights, certificate: Certificate, fresh: Sequences, boost: float, reason: str
) -> Recovery[HeadWeights]:
    """The recovery that the certificate allows: the heads, those of them that are large enough to check, or none."""
    num_fresh, why = len(fresh), ""
    residual, tolerance, rejected = certificate.residual, certificate.tolerance, certificate.rejected
    if rejected is not None and rejected < _SHOWS * tolerance:
        why = (
            f"W = 0 would answer fresh sequences nearly as well: it is off by {rejected:.1e} of an answer, where "
            f"{tolerance:.1e} is explained. Tokens may not be so long that W shows."
        )
    elif not certificate.holds:
        why = (
            f"on fresh sequences these weights are off by {residual:.1e} of an answer, where {tolerance:.1e} is "
            "explained: it is not a layer of this form, or a head was missed."
        )
    elif residual > max(_UNEXPLAINED * certificate.details["oracle_error"], _NEGLIGIBLE) and len(heads):
        refit = look_for_missed_heads(run, heads, boost)
        num_fresh += refit.num_queries
        certificate = replace(certificate, details={**certificate.details, "refit_leaves": refit.left})
        if refit.left > refit.allowed:
            why = (
                f"as many heads, fitted anew in a small subspace, leave {refit.left:.1e} of an answer, where "
                f"{refit.error:.1e} is the oracle's own error: it is not a layer of this form, or a head was missed."
            )
            claim = f"{len(heads)} heads answer sequences of a small subspace up to the oracle's own error."
            certificate = replace(certificate, claim=claim, residual=refit.left, tolerance=refit.allowed)
    shows = measure_shares(heads, fresh) > max(_SHOWS * residual, _CLEAR * _excess(certificate))
    if not why and not bool(shows.all()):
        too_small = (
            f"{int((~shows).sum())} of them are too small to check: their share of an answer is not far above the "
            f"{residual:.1e} that fresh sequences are off by."
        )
        why = "" if bool(shows.any()) else too_small
        reason = f"{reason} But {too_small}" if bool(shows.any()) else reason
    if why:
        certificate, cost = run.charge(certificate, num_fresh)
        return Recovery(no_heads(run.evidence), Status.NOTHING_FOUND, f"{reason} But {why}", certificate, cost)
    before = run.num_asked
    lengths = check_lengths(run, heads, heads, boost, fresh, certificate)
    other = check_ordinary(run, heads, heads, boost, residual)
    certificate, cost = run.charge(lengths.extend(certificate), num_fresh + run.num_asked - before)
    is_whole = bool(shows.all()) and lengths.agree and not other
    status, reason = Status.RECOVERED if is_whole else Status.PARTIAL, f"{reason}{lengths.remark}{other}"
    if run.profile.absolute_error:
        added = f"about {run.profile.absolute_error:.1e}{', the same each time' if run.profile.repeats else ''}"
        reason += f" What is added to answers is {added}; fresh sequences are off by {residual:.1e} of an answer."
    heads = heads if bool(shows.all()) else heads.select(shows)
    searches = searches_of(Aim.WEIGHTS, unconfirmed=not is_whole)
    return Recovery(heads, status, reason, certificate, cost, ("answers",), searches)


def measure_shares(heads: HeadWeights, fresh: Sequences) -> Float[Tensor, " h"]:
    """By how much answers change, at most and of an answer, without the W of a head; without its v where W = 0."""
    answers, shares = heads(fresh), []
    for W, v in zip(heads.W, heads.v, strict=True):
        own = HeadWeights(W=W[None], v=v[None])(fresh)
        without = HeadWeights(W=0 * W[None], v=v[None])(fresh) if bool(W.any()) else torch.zeros_like(own)
        shares.append((own - without).abs().max())
    return torch.stack(shares or [answers.new_tensor(0.0)])[: len(heads)] / answers.square().mean().sqrt()


def _excess(certificate: Certificate) -> float:
    """What fresh sequences are off by beyond the oracle's own error."""
    excess = certificate.residual - _CHANCE * certificate.details.get("oracle_error", 0.0)
    return excess if excess > _NEGLIGIBLE else 0.0


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
