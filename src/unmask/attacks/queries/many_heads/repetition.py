"""A few heads from tokens of bounded norm: the same two tokens in many proportions tell the heads apart."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import certify_heads, conclude, refuse
from unmask.attacks.queries.fresh import fresh_sequences
from unmask.attacks.queries.many_heads.repeated_tokens import (
    FAR,
    HeadEquations,
    RepeatedTokens,
    Solution,
    TokenNorms,
    choose_copies,
    choose_norms,
    random_vectors,
)
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.errors import InputError
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.linalg.rational import EXPLAINED_TOGETHER, MOST_HEADS, SigmoidFit, fit_shifts, fit_sigmoids
from unmask.recovery import Recovery, Status

_NUM_ATTEMPTS = 4  # other random directions, where labels went wrong
_NUM_SETS = 32  # of random directions, of which the one that tells heads apart best is asked
# Errors that the fit's conditioning explains are allowed up to this part of an answer; a missed head is a third of it.
_LOOSEST = 0.1
_ALLOWED = 3.0  # times the largest deviation among rivals
_DEVIATIONS = 2.0  # of W: what is told covers the error, save by rare chance
_MOST_UNKNOWNS = 1700  # of the joint fit: 3 heads of width 23; its Jacobian then takes 400 MB


class _NotFound(Exception):  # noqa: N818 (an ending, not an error)
    """Why heads could not be told apart."""


@dataclass(frozen=True, eq=False)
class _LearnedHeads:
    """All heads, the expected ‖Ŵ_h − W_h‖, and random heads that the answers allow about as well."""

    heads: HeadWeights
    W_error: Float[Tensor, " h"]
    rivals: tuple[HeadWeights, ...]


@dataclass(frozen=True, eq=False)
class _Slice:
    """What is asked at one y: unit directions u, all values, and the heads that explain them."""

    y: Float[Tensor, " d"]  # of norm one
    U: Float[Tensor, "q d"]
    values: Float[Tensor, "q k"]
    heads: Solution  # W: (heads, width, 1)


@dataclass(frozen=True)
class RepetitionAttack:
    """All heads of a layer with few of them, from tokens within a bound on their norm.

        F(ρ) = Σ_h (v_hᵀu)·ρ/(ρ + exp(−uᵀW_h y)),    ρ = k/l for k copies of y + u and l of y

    A rational function of ρ with one pole for each head. At one y: fit F for a basis of u; label the heads across u
    by the linearity of (t, c) at midpoints; so v_h and W_h y. At other y: v_h is known, so the fit names the heads by
    itself. Last, one least-squares fit of all weights to all answers.

    Notation: t_h = uᵀW_h y, c_h = v_hᵀu. `longest`, the length of sequences; ratios reach from 1/(longest − 1) to its
    inverse. Heads of the result are canonical: equal W have one pole, v = 0 has none.
    Limits: at most three heads: at one (u, y) a head costs 1.7 decades of conditioning with 28 ratios, and 3.1 with the
    theorem's 2H (benchmarks/run.py queries repetition). Heads with equal v have equal heights and cannot be followed
    from y to y. `estimated_error` in the certificate's details is the relative error of the worst W_h: two deviations
    by the fit's own conditioning, and what fresh sequences are off by.
    Cost: about 4.5·(H + 1)·d² + (65 + 6H)·d + 700 queries of length `longest`, where Kim, Kim, Guo count 4Hd² − 2H + 1
    of length 2H + 1 at most, in exact arithmetic.
    Source: Kim, Kim, Guo, 'Provably Learning Multi-Head Attention with Queries', arXiv 2608.03294 (read as its
    abstract only; fit, labels and the joint polish are ours).
    """

    max_heads: int = MOST_HEADS
    longest: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_heads <= MOST_HEADS:
            raise InputError(
                f"max_heads must be 1 to {MOST_HEADS}, got {self.max_heads}; poles of more heads cannot be told apart."
            )
        if self.longest < 2 * self.max_heads + 2:
            raise InputError(
                f"longest must be {2 * self.max_heads + 2} or more for {self.max_heads} heads, got {self.longest}."
            )

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Probe, find the heads at one y, follow them to others, polish, certify."""
        width, slices = evidence.width, list[_Slice]()
        run = QueryRun(self.seed, progress, evidence=evidence)
        tokens = None
        try:
            profile = run.probe()
            if profile.signs_only or profile.num_outputs or not profile.is_linear:
                why = "Repetition reads heads from single numbers that grow with the tokens; this oracle answers "
                return refuse(run, Status.NOT_APPLICABLE, why + "otherwise.")
            ask, tokens = self._prepare(run)
            slices = self._first(ask, tokens, run.generator)
            num_heads = len(slices[0].heads.v)
            run.unknowns = num_heads * width * (width + 1)
            ask = replace(ask, copies=choose_copies(self.longest, min(3 * (num_heads + 1), self.longest - 1)))
            for j in range(width):
                progress("columns of W", j, width)
                slices.append(_following(ask, tokens, slices[0], j, run.generator))
        except BudgetSpent as ending:
            heads = _assemble(slices, tokens) if slices and tokens else None
            return refuse(run, Status.BUDGET_EXHAUSTED, f"The budget ended: {ending}.", heads)
        except _NotFound as ending:
            return refuse(run, Status.NOTHING_FOUND, str(ending))
        learned = _polish(ask, slices, tokens)
        try:
            return _judge(run, learned, tokens.boost)
        except BudgetSpent as ending:
            return refuse(run, Status.BUDGET_EXHAUSTED, f"No certificate: {ending}.", learned.heads)

    def _prepare(self, run: QueryRun) -> tuple[RepeatedTokens, TokenNorms]:
        """Σ_h v_h, and norms of tokens at which scores are of the order of one."""
        evidence, profile = run.evidence, run.profile
        width, bound = evidence.width, min(profile.max_norm, FAR)
        norm = bound if profile.absolute_error else min(1.0, bound)
        eye = torch.eye(width, dtype=torch.float64, device=evidence.device)
        sum_v = evidence.ask((norm * eye)[:, None]) / norm
        copies = choose_copies(self.longest, min(6 * self.max_heads + 10, self.longest - 1))
        ask = RepeatedTokens(evidence, profile, sum_v, self.longest, copies)
        return ask, choose_norms(ask, self.max_heads, bound, run.generator)

    def _first(self, ask: RepeatedTokens, tokens: TokenNorms, generator: torch.Generator) -> list[_Slice]:
        """The heads at one random y, with v; other directions where labels do not fit."""
        for _ in range(_NUM_ATTEMPTS):
            y = torch.nn.functional.normalize(random_vectors(1, ask, generator)[0], dim=0)
            basis = torch.linalg.qr(random_vectors(len(y), ask, generator)).Q
            values, noise = ask(tokens.u_norm * basis, tokens.y_norm * y)
            fit = fit_sigmoids(ask.rho, values, self.max_heads, noise)
            clear = int(fit.t_error.nan_to_num(posinf=1e300).amax(1).argmin()) if fit.t.shape[1] else 0
            others = torch.arange(len(y), device=y.device) != clear
            middle = (basis[clear] + basis[others]) / math.sqrt(2)
            more, more_noise = ask(tokens.u_norm * middle, tokens.y_norm * y)
            U, values, noise = torch.cat([basis, middle]), torch.cat([values, more]), max(noise, more_noise)
            fit = fit_sigmoids(ask.rho, values, self.max_heads, noise)
            if fit.t.shape[1] == 0:
                above = f"the oracle's error, about {noise:.1e}"
                raise _NotFound(f"No head's influence on the answers stands out from {above}, so no W can be read.")
            if float(fit.explained.double().mean()) < 0.9:
                raise _NotFound(
                    f"{self.max_heads} heads do not explain the answers to repeated tokens: they leave "
                    f"{float(fit.residual.median()) / max(noise, 1e-300):.1e} times the oracle's error. There are more "
                    "heads, and each further one costs two to three decades of conditioning; or it is not a layer of "
                    "this form."
                )
            heads = _by_linearity(U, fit, clear, others)
            found = _slice(ask, y, U, values, noise, *heads)
            if found is not None:
                return [found]
        raise _NotFound(
            f"{fit.t.shape[1]} heads explain the answers at single tokens, but no labelling of them is linear in the "
            "tokens: heads are too close, or the errors of the oracle too large, to follow them."
        )


def _by_linearity(
    U: Float[Tensor, "q d"], fit: SigmoidFit, clear: int, others: Tensor
) -> tuple[Float[Tensor, "h d"], Float[Tensor, "h d"]]:
    """v_h and W_h y from fits whose heads come in any order: at midpoints, (t, c) of one head are the mean.

    Every order of the heads at u_i and at the midpoint of u_i and the clearest u is tried; the one with the smallest
    deviation from linearity, in standard deviations, is kept.
    """
    width, num_heads = U.shape[1], fit.t.shape[1]
    orders = torch.tensor(list(itertools.permutations(range(num_heads))), device=U.device)
    z = torch.stack([fit.t, fit.c], dim=2)  # (q, h, 2)
    variance = torch.stack([fit.t_error, fit.c_error], dim=2).square().nan_to_num(posinf=1e300) + 1e-300
    labelled, weight = z.clone(), 1 / variance
    for place, i in enumerate(others.nonzero()[:, 0].tolist()):
        middle = width + place
        ends, at_middle = (z[clear] + z[i][orders]) / math.sqrt(2), z[middle][orders]  # (orders, h, 2)
        spread = (variance[clear] + variance[i][orders])[:, None] / 2 + variance[middle][orders]
        deviation = ((ends[:, None] - at_middle).square() / spread).sum((2, 3))
        best, best_middle = divmod(int(deviation.argmin()), len(orders))
        for row, order in ((i, orders[best]), (middle, orders[best_middle])):
            labelled[row], weight[row] = z[row][order], 1 / variance[row][order]
    W_y, v = (_solve_weighted(U, labelled[:, :, part], weight[:, :, part]) for part in (0, 1))
    return v, W_y


def _following(ask: RepeatedTokens, tokens: TokenNorms, first: _Slice, j: int, generator: torch.Generator) -> _Slice:
    """The heads at (y₀ ± e_j)/‖·‖: heights are known there, so every fit names its heads."""
    sign = 1.0 if float(first.y[j]) >= 0 else -1.0
    y = first.y.clone()
    y[j] += sign
    y = y / y.norm()
    for _ in range(_NUM_ATTEMPTS):
        U = _telling_directions(ask, first.heads.v, generator)
        values, noise = ask(tokens.u_norm * U, tokens.y_norm * y)
        t, spread = fit_shifts(ask.rho, values, U @ first.heads.v.mT)
        W_y = _solve_weighted(U, t, 1 / spread.square().clamp(1e-200, 1e200))
        found = _slice(ask, y, U, values, noise, first.heads.v, W_y)
        if found is not None:
            return replace(found, heads=_in_order(found.heads, first.heads.v))
    raise _NotFound(
        f"The {len(first.heads.v)} heads that were found at one token could not be followed to another: their v are "
        "too close to each other, or the errors of the oracle too large."
    )


def _in_order(heads: Solution, v: Float[Tensor, "h d"]) -> Solution:
    """The heads in the order of those with the same v: a polish that began far off may exchange them."""
    orders = itertools.permutations(range(len(v)))
    order = list(min(orders, key=lambda order: float((heads.v[list(order)] - v).square().sum())))
    return replace(heads, v=heads.v[order], W=heads.W[order], W_error=heads.W_error[order])


def _telling_directions(
    ask: RepeatedTokens, v: Float[Tensor, "h d"], generator: torch.Generator
) -> Float[Tensor, "q d"]:
    """Of some random sets, that whose heights are farthest from zero and from each other; orthonormal, and half more.

    Two heads whose t nearly agree at some u fit as well when exchanged around their mean. Such rows weigh little, and
    the half more rows determine W_h y without them.
    """
    width, num = v.shape[1], _NUM_SETS
    bases = torch.linalg.qr(random_vectors(2 * num * width, ask, generator).reshape(2, num, width, width)).Q
    U = torch.cat([bases[0], bases[1][:, : width // 2 + 2]], dim=1)
    c = U @ v.mT
    pairs = [c, *(c[..., h : h + 1] - c[..., g : g + 1] for h in range(len(v)) for g in range(h))]
    return U[int(torch.cat(pairs, dim=2).abs().log().clamp_min(-700).mean((1, 2)).argmax())]


def _slice(
    ask: RepeatedTokens, y: Tensor, U: Tensor, values: Tensor, noise: float, v: Tensor, W_y: Tensor
) -> _Slice | None:
    """The heads at one y, polished; None where they do not explain the values."""
    ones = torch.ones_like(U[:, :1])
    heads = HeadEquations(ask.rho.log(), U, ones, values, len(v)).polish(v, W_y[:, :, None])
    return _Slice(y, U, values, heads) if heads.residual <= EXPLAINED_TOGETHER * noise else None


def _assemble(slices: list[_Slice], tokens: TokenNorms) -> HeadWeights:
    """Columns of W from differences to the first slice; NaN where none was asked."""
    first = slices[0]
    W = torch.full((*first.heads.v.shape, len(first.y)), math.nan, dtype=torch.float64, device=first.y.device)
    for j, other in enumerate(slices[1:]):
        sign = 1.0 if float(first.y[j]) >= 0 else -1.0
        longer = first.y.clone()
        longer[j] += sign
        W[:, :, j] = sign * (longer.norm() * other.heads.W[:, :, 0] - first.heads.W[:, :, 0])
    return HeadWeights(W=W / (tokens.u_norm * tokens.y_norm), v=first.heads.v / tokens.u_norm)


def _polish(ask: RepeatedTokens, slices: list[_Slice], tokens: TokenNorms) -> _LearnedHeads:
    """All weights from all answers at once, where they are not too many."""
    heads = _assemble(slices, tokens)
    scores, heights = tokens.u_norm * tokens.y_norm, tokens.u_norm
    if heads.W.numel() + heads.v.numel() > _MOST_UNKNOWNS:
        errors = torch.stack([part.heads.W_error for part in slices[1:]]).norm(dim=0) * math.sqrt(2) / scores
        return _LearnedHeads(heads, errors, ())
    later = slices[1:]  # the first was asked with other ratios
    Y = torch.cat([part.y.expand_as(part.U) for part in later])
    U, values = torch.cat([part.U for part in later]), torch.cat([part.values for part in later])
    found = HeadEquations(ask.rho.log(), U, Y, values, len(heads)).polish(heads.v * heights, heads.W * scores)
    rivals = tuple(HeadWeights(W=W / scores, v=v / heights) for v, W in found.rivals)
    return _LearnedHeads(HeadWeights(W=found.W / scores, v=found.v / heights), found.W_error / scores, rivals)


def _judge(run: QueryRun, learned: _LearnedHeads, boost: float) -> Recovery[HeadWeights]:
    """As for all learners; but an error that the fit's own conditioning lets expect is no sign of a wrong model."""
    heads = learned.heads
    fresh = fresh_sequences(heads, boost, min(run.profile.max_norm, FAR), run.generator)
    certificate = certify_heads(run, heads, fresh)
    answers = heads(fresh)
    apart = [float((rival(fresh) - answers).abs().max()) for rival in learned.rivals]
    expected = max(apart, default=0.0) / float(answers.square().mean().sqrt().clamp_min(1e-300))
    tolerance = max(certificate.tolerance, min(_ALLOWED * expected, _LOOSEST))
    error = _DEVIATIONS * float((learned.W_error / heads.W.flatten(1).norm(dim=1)).max())
    error = math.hypot(error, certificate.details.get("lasting_error", 0.0))
    details = {**certificate.details, "estimated_error": error, "num_heads": len(heads)}
    certificate = replace(certificate, tolerance=tolerance, details=details)
    reason = (
        f"{len(heads)} heads explain the answers to repeated tokens; the worst W is expected to be off by {error:.1e}."
    )
    return conclude(run, heads, certificate, fresh, boost, reason)


def _solve_weighted(
    U: Float[Tensor, "q d"], z: Float[Tensor, "q h"], weight: Float[Tensor, "q h"]
) -> Float[Tensor, "h d"]:
    """The linear map with z = U·map, head by head, by weighted least squares."""
    root = weight.sqrt().mT[:, :, None]  # (h, q, 1)
    root = root / root.amax(1, keepdim=True)
    # A row of no weight may leave a direction open; the minimum-norm solution puts 0 there, and the polish corrects it.
    return torch.linalg.lstsq(root * U, root * z.mT[:, :, None], driver="gelsd").solution[:, :, 0]
