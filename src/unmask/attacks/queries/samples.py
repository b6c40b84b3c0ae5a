"""Heads from samples that somebody else chose: least squares in all weights, judged on samples that were held out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.samples import SampleEvidence
from unmask.linalg.heads import EQUAL_TOLERANCE, HeadWeights, canonical_heads
from unmask.linalg.least_squares import Equations, Polished, polish_equations
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of

_HELD_OUT = 0.1  # of the samples, from 32 to 512 of them
_FEWEST, _MOST = 32, 512
_EXACT = 1e-8  # of an answer: what nobody agrees to by chance
_ALLOWED = 20.0  # times the noise that the fit leaves: the largest of some hundred, and the error of the weights
_LOOSEST = 0.1  # of an answer: noise that could hide what is no head
_LEAST_SPARE = 1.02  # samples for each weight: without any to spare, every answer is explained
_LARGEST_ERROR = 0.1  # of W, by the fit's own covariance
_START = 0.3  # of a typical score, that of random starts
_MOST_ENTRIES = 2**27  # of the Jacobian: 1 GiB
_NUM_STEPS = 80
_ROUNDING = 1e-12  # of an answer: what is left that needs no further head, nor noise
_MORE_STEPS, _MORE_STARTS = 40, 3  # for a further head
_FALLS = 4.0  # deviations by which a further head must lower the squares of what held-out samples leave
_CHANCE = 3.1  # deviations: once in 1,000


@dataclass(frozen=True)
class SamplesAttack:
    """W and v of heads from pairs (X_i, f(X_i)) of any distribution; no sequence is chosen.

        min over (W, v) of Σ_i (f_{W,v}(X_i) − a_i)²
        ∂f/∂v = Σ_k a_k x_k,   ∂f/∂W = (Σ_k a_k·(vᵀx_k − f)·x_k) x_nᵀ

    Levenberg–Marquardt from W = 0 and the v of least squares there, then from small random W. A tenth of the samples
    is held out; the weights count only if these are answered too.

    What the fit leaves may be noise or a head that is missing. So one more head is fitted from there; if it answers
    the samples that were held out significantly better, it counts, or nothing does where `max_heads` is reached.

    Notation: a_k = softmax_k(x_kᵀ W x_n). `max_heads` heads are tried, one more at a time. σ̂ is what the fit leaves
    for a sample, over those to spare; `estimated_error` the error of W that σ̂²·(JᵀJ)⁻¹ allows but for chance.
    Limits: fewer samples than weights determine nothing. Where samples leave a direction of W open (tokens in a
    subspace, scores that hardly vary) the estimated error is large and nothing is claimed. Least squares may end in a
    local minimum; held-out samples then refuse. A head below the noise is not seen.
    Cost: some ten QRs of (samples, weights); no query.
    Source: ours. arXiv 2601.16873 chooses its queries; its theorems are not about given samples.
    """

    max_heads: int = 1
    num_starts: int = 6
    seed: int = 0

    def __call__(self, evidence: SampleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Fit, and check on what was held out."""
        if not isinstance(evidence, SampleEvidence):
            raise InputError(
                f"samples are read from SampleEvidence(sequences, answers), got {type(evidence).__name__}; where "
                "sequences may be chosen, use another attack"
            )
        run = Run(self.seed, progress)
        X, answers = evidence.sequences.double(), evidence.answers.double()
        order = torch.randperm(len(X), generator=run.generator).to(X.device)
        held = min(_MOST, max(_FEWEST, round(_HELD_OUT * len(X))))
        learning, kept = order[held:], order[:held]
        size = float(answers.square().mean().sqrt())
        if size == 0:
            return _refuse(run, evidence, Status.NOT_IDENTIFIABLE, "All answers are 0: any W gives them where v = 0.")
        last, more = "", None
        for num_heads in range(1, self.max_heads + 1):
            last = _too_few(evidence, len(learning), num_heads)
            if last:
                break
            for start in range(self.num_starts):
                progress(f"starts, {num_heads} head(s)", start, self.num_starts)
                fit = more or _fit(X[learning], answers[learning], num_heads, start, run)
                more = None
                recovery = self._judge(run, evidence, fit, X[kept], answers[kept], num_heads, len(learning))
                last = recovery.reason
                if recovery.status is not Status.RECOVERED:
                    continue
                if fit.deviation <= _ROUNDING * size:
                    return recovery
                if _too_few(evidence, len(learning), num_heads + 1):
                    return _unsure(recovery, _too_few(evidence, len(learning), num_heads + 1))
                more = self._add_head(X, answers, learning, kept, fit, num_heads, run)
                if more is None:
                    return recovery
                last = (
                    f"{recovery.reason} But one head more answers what was held out significantly better: what "
                    f"{num_heads} head(s) leave, {fit.deviation / size:.1e} of an answer, is no noise. Try max_heads="
                    f"{num_heads + 1} or more; or it is not a layer of this form."
                )
                break
        return _refuse(run, evidence, Status.NOTHING_FOUND, last)

    def _add_head(
        self, X: Tensor, answers: Tensor, learning: Tensor, kept: Tensor, fit: Polished, num_heads: int, run: Run
    ) -> Polished | None:
        """One head more, if held-out samples show that it belongs there; None if not."""
        width = X.shape[2]
        heads = _unpack(fit.x, num_heads, width)
        before = (heads(X[kept]) - answers[kept]).square()
        left = answers[learning] - heads(X[learning])
        for _ in range(_MORE_STARTS):
            added = _start_heads(X[learning], left, 1, run)
            x = torch.cat([torch.cat([heads.v, added.v]).flatten(), torch.cat([heads.W, added.W]).flatten()])
            more = polish_equations(sample_equations(X[learning], answers[learning], num_heads + 1), x, _MORE_STEPS)
            falls = before - (_unpack(more.x, num_heads + 1, width)(X[kept]) - answers[kept]).square()
            if float(falls.mean()) > _FALLS * float(falls.std()) / math.sqrt(len(falls)):
                return more
        return None

    def _judge(
        self, run: Run, evidence: SampleEvidence, fit: Polished, X: Tensor, answers: Tensor, num_heads: int, used: int
    ) -> Recovery[HeadWeights]:
        heads = _unpack(fit.x, num_heads, evidence.width)
        size = float(answers.square().mean().sqrt().clamp_min(1e-300))
        residual = float((heads(X) - answers).abs().max()) / size
        noise = fit.deviation / size
        tolerance = max(_EXACT, min(_ALLOWED * noise, _LOOSEST))
        still = HeadWeights(W=torch.zeros_like(heads.W), v=heads.v)
        rejected = float((still(X) - answers).abs().max()) / size
        error = _expected_error(fit, heads)
        claim = f"With these weights {len(X)} samples that were held out are answered as the layer did."
        details = {
            "samples": float(used),
            "held_out": float(len(X)),
            "weights": float(len(fit.x)),
            "samples_per_weight": used / len(fit.x),
            "noise": noise,
            "estimated_error": error,
        }
        certificate = Certificate(claim, residual, tolerance, rejected, details)
        reason = (
            f"{len(heads)} head(s) from {used} samples of {X.shape[1]} tokens; by the fit's own conditioning W is off "
            f"by {error:.1e}. What is answered to other numbers of tokens is not known."
        )
        if certificate.holds and rejected > 2 * tolerance and error <= _LARGEST_ERROR:
            return Recovery(
                canonical_heads(heads, min(EQUAL_TOLERANCE, max(_ROUNDING, noise))),
                Status.RECOVERED,
                reason,
                certificate,
                run.cost(queries=0),
                ("answers",),
                searches_of(Aim.WEIGHTS),
            )
        if not certificate.holds:
            why = f"{reason} But samples that were held out are off by {residual:.1e} of an answer."
        elif error > _LARGEST_ERROR:
            why = f"{reason} That is too much: use more samples, or such whose tokens and scores vary more."
        else:
            why = f"{reason} But W = 0 answers what was held out nearly as well."
        return _refuse(run, evidence, Status.NOTHING_FOUND, why)


def sample_equations(X: Float[Tensor, "m n d"], answers: Float[Tensor, " m"], num_heads: int) -> Equations:
    """Unknowns: v (heads, d), then W (heads, d, d), flat."""
    width = X.shape[2]

    def equations(x: Float[Tensor, " x"]) -> tuple[Tensor, Tensor]:
        heads = _unpack(x, num_heads, width)
        share = torch.einsum("mnd,hde,me->hmn", X, heads.W, X[:, -1]).softmax(2)
        by_v = torch.einsum("hmn,mnd->mhd", share, X)
        values = torch.einsum("mnd,hd->hmn", X, heads.v)
        mean = (share * values).sum(2)
        by_score = torch.einsum("hmn,mnd->mhd", share * (values - mean[:, :, None]), X)
        by_W = by_score[:, :, :, None] * X[:, -1][:, None, None]
        return mean.sum(0) - answers, torch.cat([by_v.flatten(1), by_W.flatten(1)], dim=1)

    return equations


def _unpack(x: Float[Tensor, " x"], num_heads: int, width: int) -> HeadWeights:
    v, W = x.split([num_heads * width, num_heads * width**2])
    return HeadWeights(W=W.reshape(num_heads, width, width), v=v.reshape(num_heads, width))


def _fit(X: Tensor, answers: Tensor, num_heads: int, start: int, run: Run) -> Polished:
    """From W = 0, or small random W where that was tried or heads must differ."""
    heads = _start_heads(X, answers, num_heads, run, is_zero=start == 0 and num_heads == 1)
    x = torch.cat([heads.v.flatten(), heads.W.flatten()])
    return polish_equations(sample_equations(X, answers, num_heads), x, _NUM_STEPS)


def _start_heads(X: Tensor, answers: Tensor, num_heads: int, run: Run, is_zero: bool = False) -> HeadWeights:
    """W = 0 or small random W, and the v of least squares there."""
    width = X.shape[2]
    W = torch.randn(num_heads, width, width, generator=run.generator, dtype=torch.float64).to(X)
    W = torch.zeros_like(W) if is_zero else W
    scores = torch.einsum("mnd,hde,me->hmn", X, W, X[:, -1])
    W = W * (_START / scores.std().clamp_min(1e-300)) if bool(W.any()) else W
    share = torch.einsum("mnd,hde,me->hmn", X, W, X[:, -1]).softmax(2)
    means = torch.einsum("hmn,mnd->mhd", share, X).flatten(1)
    v = torch.linalg.lstsq(means, answers[:, None], driver="gelsd").solution[:, 0]
    return HeadWeights(W=W, v=v.reshape(num_heads, width))


def _too_few(evidence: SampleEvidence, num_learning: int, num_heads: int) -> str:
    """Why so many heads cannot be fitted; empty where they can."""
    weights = num_heads * evidence.width * (evidence.width + 1)
    held = len(evidence) - num_learning
    if num_learning < _LEAST_SPARE * weights:
        return (
            f"{len(evidence)} samples, {held} of them held out, do not determine the {weights} weights of "
            f"{num_heads} head(s): {math.ceil(_LEAST_SPARE * weights) + held} are needed."
        )
    if num_learning * weights > _MOST_ENTRIES:
        return f"{weights} weights and {num_learning} samples are more than least squares is tried with."
    return ""


def _unsure(recovery: Recovery[HeadWeights], why: str) -> Recovery[HeadWeights]:
    """Heads that explain the samples, where noise and a further head cannot be told apart."""
    reason = f"{recovery.reason} Whether what they leave is noise or a further head is not known: {why}"
    searches = searches_of(Aim.WEIGHTS, unconfirmed=True)
    return replace(recovery, status=Status.PARTIAL, reason=reason, searches=searches)


def _expected_error(fit: Polished, heads: HeadWeights) -> float:
    """The relative error of the worst W by C = σ̂²·(JᵀJ)⁻¹, infinite where J leaves a direction open.

    ‖ΔW‖² ≤ tr C + 3.1·√(2·tr C²), but once in 1,000
    """
    norms = fit.J.norm(dim=0)
    if not bool((norms > 0).all()):
        return math.inf
    R = torch.linalg.qr(fit.J / norms).R
    values = torch.linalg.svdvals(R)
    if float(values[-1]) <= 1e-10 * float(values[0]):
        return math.inf
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    spread = torch.linalg.solve_triangular(R, eye, upper=True) / norms[:, None]
    worst = 0.0
    for rows, W in zip(spread[heads.v.numel() :].split(heads.W[0].numel()), heads.W, strict=True):
        C = rows @ rows.mT
        total = C.trace()
        chance = 1 + _CHANCE * math.sqrt(2 * float(C.square().sum() / total.square()))
        worst = max(worst, fit.deviation * math.sqrt(float(total) * chance) / max(float(W.norm()), 1e-300))
    return worst


def _refuse(run: Run, evidence: SampleEvidence, status: Status, reason: str) -> Recovery[HeadWeights]:
    empty = torch.zeros(0, evidence.width, dtype=torch.float64, device=evidence.answers.device)
    none = HeadWeights(W=empty[:, :, None].expand(-1, -1, evidence.width), v=empty)
    return Recovery(none, status, reason, Certificate.none(reason), run.cost(queries=0))
