"""Heads from samples that somebody else chose: least squares in all weights, judged on samples that were held out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.samples import SampleEvidence
from unmask.linalg.heads import HeadWeights, canonical_heads
from unmask.linalg.least_squares import Equations, Polished, polish_equations
from unmask.recovery import Certificate, Recovery, Status

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


@dataclass(frozen=True)
class SamplesAttack:
    """W and v of heads from pairs (X_i, f(X_i)) of any distribution; no sequence is chosen.

        min over (W, v) of Σ_i (f_{W,v}(X_i) − a_i)²
        ∂f/∂v = Σ_k a_k x_k,   ∂f/∂W = (Σ_k a_k·(vᵀx_k − f)·x_k) x_nᵀ

    Levenberg–Marquardt from W = 0 and the v of least squares there, then from small random W. A tenth of the samples
    is held out; the weights count only if these are answered too.

    Notation: a_k = softmax_k(x_kᵀ W x_n). `max_heads` heads are tried, one more at a time. σ̂ is what the fit leaves
    for a sample, over those to spare; `estimated_error` the error of W that σ̂²·(JᵀJ)⁻¹ lets expect.
    Limits: fewer samples than weights determine nothing. Where samples leave a direction of W open (tokens in a
    subspace, scores that hardly vary) the estimated error is large and nothing is claimed. Least squares may end in a
    local minimum; held-out samples then refuse.
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
        last = ""
        for num_heads in range(1, self.max_heads + 1):
            weights = num_heads * evidence.width * (evidence.width + 1)
            if len(learning) < _LEAST_SPARE * weights:
                last = (
                    f"{len(evidence)} samples, {held} of them held out, do not determine the {weights} weights of "
                    f"{num_heads} head(s): {math.ceil(_LEAST_SPARE * weights) + held} are needed."
                )
                break
            if len(learning) * weights > _MOST_ENTRIES:
                last = f"{weights} weights and {len(learning)} samples are more than least squares is tried with."
                break
            for start in range(self.num_starts):
                progress(f"starts, {num_heads} head(s)", start, self.num_starts)
                fit = _fit(X[learning], answers[learning], num_heads, start, run)
                recovery = self._judge(run, evidence, fit, X[kept], answers[kept], num_heads, len(learning))
                if recovery.status is Status.RECOVERED:
                    return recovery
                last = recovery.reason
        return _refuse(run, evidence, Status.NOTHING_FOUND, last)

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
        reason = f"{len(heads)} head(s) from {used} samples; by the fit's own conditioning W is off by {error:.1e}."
        if certificate.holds and rejected > 2 * tolerance and error <= _LARGEST_ERROR:
            return Recovery(
                canonical_heads(heads), Status.RECOVERED, reason, certificate, run.cost(queries=0), ("answers",)
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
    """From W = 0, or small random W where that was tried or heads must differ; v is then that of least squares."""
    width = X.shape[2]
    W = torch.randn(num_heads, width, width, generator=run.generator, dtype=torch.float64).to(X)
    if start == 0 and num_heads == 1:
        W = torch.zeros_like(W)
    scores = torch.einsum("mnd,hde,me->hmn", X, W, X[:, -1])
    W = W * (_START / scores.std().clamp_min(1e-300)) if bool(W.any()) else W
    share = torch.einsum("mnd,hde,me->hmn", X, W, X[:, -1]).softmax(2)
    means = torch.einsum("hmn,mnd->mhd", share, X).flatten(1)
    v = torch.linalg.lstsq(means, answers[:, None], driver="gelsd").solution[:, 0]
    return polish_equations(sample_equations(X, answers, num_heads), torch.cat([v, W.flatten()]), _NUM_STEPS)


def _expected_error(fit: Polished, heads: HeadWeights) -> float:
    """The relative error of the worst W, from σ̂²·(JᵀJ)⁻¹; infinite where J leaves a direction open."""
    norms = fit.J.norm(dim=0)
    if not bool((norms > 0).all()):
        return math.inf
    R = torch.linalg.qr(fit.J / norms).R
    values = torch.linalg.svdvals(R)
    if float(values[-1]) <= 1e-10 * float(values[0]):
        return math.inf
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    spread = fit.deviation * torch.linalg.solve_triangular(R, eye, upper=True).norm(dim=1) / norms
    W = _unpack(spread, len(heads), heads.v.shape[1]).W
    return float((W.flatten(1).norm(dim=1) / heads.W.flatten(1).norm(dim=1).clamp_min(1e-300)).max())


def _refuse(run: Run, evidence: SampleEvidence, status: Status, reason: str) -> Recovery[HeadWeights]:
    empty = torch.zeros(0, evidence.width, dtype=torch.float64, device=evidence.answers.device)
    none = HeadWeights(W=empty[:, :, None].expand(-1, -1, evidence.width), v=empty)
    return Recovery(none, status, reason, Certificate.none(reason), run.cost(queries=0))
