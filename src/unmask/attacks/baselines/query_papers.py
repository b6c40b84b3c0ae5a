"""The paper's own learners of a single head, to compare with: random or unit probes, and the nuclear norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import is_zero, judge_heads, refuse
from unmask.attacks.queries.one_head.boosted_probes import columns_at_once
from unmask.attacks.queries.one_head.single_head import out_of_budget, unknown_head
from unmask.attacks.queries.opening import not_applicable, silence
from unmask.attacks.queries.pairs import Pairs, logit
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.errors import InputError
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence, Refused
from unmask.linalg.heads import HeadWeights
from unmask.progress import track
from unmask.recovery import Recovery, Status

_ROUNDING = 1e-14  # of the largest |v_i|: what float64 leaves of a zero
_MOST_READABLE = 12.0  # |t|: beyond it fewer than ten digits are left, and one bad measurement spoils all


@dataclass(frozen=True)
class PaperSingleHeadAttack:
    """W and v of a single head as the paper has them.

        v_i = f([e_i]);   y = κe_j;   t_i = logit((f([y + u_i; y]) − v·y)/(v·u_i));   W y = U⁻¹t

    Notation: rows of U are κe_i, and κ(e_i + e_p) where v_i = 0, with v_p ≠ 0 ('basis'), or Gaussian with entries of
    deviation κ ('random').
    Limits: v·u_i has no lower bound: unit probes lose digits to the smallest |v_i| that is not 0, random ones to the
    smallest v·u_i and to the condition of U, which grows with d. Nothing is asked again: what saturates is lost, so κ
    must suit the size of W. Which p the second probe takes is free; here |v_p| is the largest, the best choice. Noise
    makes zeros of v small numbers: entries up to `margin` count as zero (Thm 6.1 knows a γ that others exceed).
    Cost: d + d² learning queries.
    Source: arXiv 2601.16873, Thm 4.1; κ = B^(−½) with |W_ij| ≤ B is Thm 6.1's.
    """

    probes: Literal["random", "basis"] = "basis"
    kappa: float = 1.0
    margin: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.probes not in ("random", "basis"):
            raise InputError(f"probes must be 'random' or 'basis', got {self.probes!r}")
        if not self.kappa > 0:
            raise InputError(f"kappa must be positive, got {self.kappa}")

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Learn, and check on fresh sequences."""
        d = evidence.width
        run = QueryRun(self.seed, progress, evidence=evidence, unknowns=d * d + d)
        return _learn(run, lambda v: self.weights(evidence, v, run.generator))

    def weights(
        self, evidence: OracleEvidence, v: Float[Tensor, " d"], generator: torch.Generator
    ) -> Float[Tensor, "d d"]:
        """W as it comes out, whatever it is worth."""
        d = evidence.width
        unit = torch.eye(d, dtype=torch.float64, device=v.device)
        drawn = torch.randn(d, d, generator=generator, dtype=torch.float64).to(v)
        U = self.kappa * (unit_probes(v, self.margin) if self.probes == "basis" else drawn)
        pairs, images = Pairs(evidence, v), []
        for Y in unit.split(columns_at_once(evidence, d)):
            asked = U.repeat(len(Y), 1)
            t = logit(pairs(asked, self.kappa * Y.repeat_interleave(d, 0)) / (asked @ v))
            images.append(torch.linalg.solve(U, t.reshape(len(Y), d).T))
        return torch.cat(images, dim=1) / self.kappa


def unit_probes(v: Float[Tensor, " d"], margin: float = 0.0) -> Float[Tensor, "d d"]:
    """Rows e_i, and e_i + e_p where v_i is zero up to rounding, or to the margin; |v_p| is the largest."""
    probes = torch.eye(len(v), dtype=torch.float64, device=v.device)
    largest = int(v.abs().argmax())
    counts_as_zero = v.abs() <= max(margin, _ROUNDING * float(v.abs()[largest]))
    counts_as_zero[largest] = False
    probes[counts_as_zero, largest] = 1
    return probes


@dataclass(frozen=True)
class NuclearNormAttack:
    """W of low rank and v of a single head, from random measurements and the nuclear norm.

        t_k = u_kᵀ W y_k = logit(F(u_k, y_k)/(v·u_k)),   Ŵ = argmin ‖Z‖_* subject to u_kᵀ Z y_k = t_k

    Notation: u_k, y_k Gaussian vectors of deviation κ.
    Limits: exact, up to the solver's 10⁻⁷ or so, from about 2.5·r(2d − r) measurements on. Measurements that saturate
    are left out. `LowRankAttack` needs r(2d − r), and no solver.
    Cost: d + num_measurements learning queries; memory num_measurements².
    Source: arXiv 2601.16873, Thm 5.1.
    """

    num_measurements: int
    kappa: float = 0.5
    seed: int = 0
    max_steps: int = 3000

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.num_measurements < 1:
            raise InputError(f"num_measurements must be 1 or more, got {self.num_measurements}")

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Learn, and check on fresh sequences."""
        d = evidence.width
        if self.num_measurements > d * d:
            raise InputError(
                f"num_measurements must be at most {d * d}, as many as W has entries, got {self.num_measurements}"
            )
        run = QueryRun(self.seed, progress, evidence=evidence, unknowns=d * d + d)
        return _learn(run, lambda v: self.weights(evidence, v, run.generator))

    def weights(
        self, evidence: OracleEvidence, v: Float[Tensor, " d"], generator: torch.Generator
    ) -> Float[Tensor, "d d"]:
        """W as it comes out, whatever it is worth."""
        shape = (2, self.num_measurements, evidence.width)
        U, Y = self.kappa * torch.randn(shape, generator=generator, dtype=torch.float64).to(v)
        t = logit(Pairs(evidence, v)(U, Y) / (U @ v))
        kept = t.isfinite() & (t.abs() < _MOST_READABLE)
        return least_nuclear_norm(U[kept], Y[kept], t[kept], self.max_steps)[0]


def _learn(run: QueryRun, weights: Callable[[Float[Tensor, " d"]], Float[Tensor, "d d"]]) -> Recovery[HeadWeights]:
    """v from unit tokens, W from what a method makes of it, judged as any learner is."""
    evidence = run.evidence
    heads = unknown_head(evidence)
    try:
        profile = run.probe()
        if profile.num_outputs or profile.signs_only or not profile.is_linear:
            return refuse(run, Status.NOT_APPLICABLE, not_applicable(profile, "numbers"))
        heads.v[0] = evidence.ask(torch.eye(evidence.width, dtype=torch.float64, device=evidence.device)[:, None])
        if is_zero(heads.v[0], profile):
            return refuse(run, *silence(profile))
        run.progress("learning W", 0, 1)
        heads.W[0] = weights(heads.v[0])
        if not heads.W.isfinite().all():
            reason = "Some scores saturated or met v·u = 0, so that the linear system has no finite right side."
            return refuse(run, Status.NOTHING_FOUND, reason)
        return judge_heads(run, heads, 1.0, "v from unit tokens, W by the paper's method.")
    except BudgetSpent as spent:
        return out_of_budget(run, heads, spent)
    except Refused as seen:
        return refuse(run, Status.NOTHING_FOUND, str(seen))


_RIDGE = 1e-13  # of the mean diagonal: Gram matrices of n ≤ d² random measurements are definite but for rounding
_SHRINKAGE = 0.1  # of the first guess's norm; Douglas-Rachford converges for any, fastest for about this


def least_nuclear_norm(
    X: Float[Tensor, "n d"],
    Y: Float[Tensor, "n d"],
    b: Float[Tensor, " n"],
    max_steps: int = 3000,
    tolerance: float = 1e-11,
) -> tuple[Float[Tensor, "d d"], int]:
    """min ‖Z‖_* subject to x_kᵀ Z y_k = b_k, by Douglas-Rachford splitting; the matrix, and the steps taken.

        P = proj(Z),   Q = shrink_γ(2P − Z),   Z ← Z + Q − P,   until ‖Q − P‖ ≤ tolerance·‖P‖

    Notation: proj the nearest matrix that meets the measurements, Z + Aᵀ(AAᵀ)⁻¹(b − AZ), with
    (AAᵀ)_kl = (x_kᵀx_l)(y_kᵀy_l); shrink_γ lowers singular values by γ, to 0 at the least.
    Limits: a matrix of rank r is the minimiser with high probability from about 2.5 times its r(2d − r) degrees of
    freedom on; below, something else of smaller norm is. Measurements must be independent, so n ≤ d².
    Cost: a Cholesky factor of (n, n) once; a step is an SVD of (d, d) and two triangular solves.
    Source: Recht, Fazel, Parrilo 2010 (nuclear norm); Combettes and Pesquet 2007 (Douglas-Rachford).
    """
    gram = (X @ X.T) * (Y @ Y.T)
    gram = gram + _RIDGE * gram.diagonal().mean() * torch.eye(len(b)).to(gram)
    factor = torch.linalg.cholesky(gram)

    def project(Z: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
        off = b - torch.einsum("kd,kd->k", X @ Z, Y)
        weights = torch.cholesky_solve(off[:, None], factor)
        return Z + (X * weights).T @ Y

    Z = project(X.new_zeros(X.shape[1], X.shape[1]))
    shrinkage = _SHRINKAGE * torch.linalg.matrix_norm(Z, 2)
    P = Z
    for step in track(range(max_steps), "solving for the least nuclear norm"):
        P = project(Z)
        left, values, right = torch.linalg.svd(2 * P - Z, full_matrices=False)
        Q = (left * (values - shrinkage).clamp_min(0)) @ right
        Z = Z + Q - P
        if torch.linalg.matrix_norm(Q - P) <= tolerance * torch.linalg.matrix_norm(P):
            return P, step + 1
    return P, max_steps
