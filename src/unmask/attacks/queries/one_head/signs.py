"""One head from the signs of its answers alone: every bit of every weight costs one query."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.queries.claims import no_heads, refuse
from unmask.attacks.queries.fresh import FRESH_LENGTH, ask_other_lengths
from unmask.attacks.queries.one_head.boosted_probes import BoostedProbes, columns_at_once
from unmask.attacks.queries.one_head.single_head import out_of_budget, unknown_head
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, silent
from unmask.errors import InputError
from unmask.evidence.ledger import BudgetSpent
from unmask.evidence.oracles import OracleEvidence, Refused, Sequences
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Aim, Certificate, Recovery, Status, searches_of

_WIDEST = 8.0  # |t| that a bisection begins with; scores of deviation 1 pass it in 10⁻¹⁵ of cases
_PILOT_PAIRS, _PILOT_BITS, _PILOT_STEP = 8, 8, 16.0
_LEAST_SEEN = 0.3  # |t|, five times what the pilot's bits tell apart
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-12, 1e15
_NUM_BOUNDARY = 32  # fresh sequences on the boundary; two questions each
_FEWEST_DRAWN = 8  # sequences that tell the size of answers, however few of them are asked
# Of a typical answer, in units of 2^(−bits): how far from the boundary is asked. Bisection leaves 16 units in a score.
# Measured at width 16: at 100 all signs are right, at 30 one in 64 is wrong now and then, at 10 five are. The rest is
# for wider layers, whose scores add up more errors.
_MARGIN = 1e3


@dataclass(frozen=True)
class MembershipAttack:
    """W and v̂ = v/|v| of a single head that tells only whether f(X) > 0.

        f([sg_i e_i − ρ·sg_p e_p]) > 0   ⟺   |v_i|/|v_p| > ρ                           (v̂, by bisection of ρ)
        f([u/η + ηy; ηy]) > 0            ⟺   (v·u)·σ(uᵀWy) > η²·(−v·y)                (uᵀWy, by bisection of η)

    with v·u > 0 > v·y, which probes that lean towards v and away from it give. All scores of many columns are
    bisected together: one ask for each bit. The bisection is of t = uᵀWy itself, η² = (v·u)·σ(t)/(−v·y).

    Notation: sg_i the sign of v_i, p the place of the largest |v_i|, σ the logistic function.
    Limits: sign f is the same for v and λv, λ > 0: |v| is not identifiable. All that signs determine is W and v̂; when
    these are known the secret is recovered up to that gauge, so the status is RECOVERED, and value.v has norm 1. Token
    norms must be free: η scales them. A run whose budget ends knows W in no unit direction, so W stays NaN.
    Certificate: sequences are moved onto the boundary of the learned function and asked a little (10³·2^(−bits) of an
    answer) on both sides of it. Weights that are off by more than that would give about half of the answers wrong;
    all of them must be right, at 6 tokens and at 39 other lengths.
    Cost: bits·(d² + d − 1) learning queries, and 2d + at most 64 for each factor of 16 that W is away from usual.
    Source: arXiv 2601.16873, Thm B.1, has W by bisection and v by about 1/ε² samples; bisection for both is ours.
    """

    bits: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the number of bits."""
        if not 4 <= self.bits <= 52:
            raise InputError(f"bits must be between 4 and 52, as many as a float64 has, got {self.bits}")

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Learn, and check on both sides of the boundary."""
        d = evidence.width
        run = QueryRun(self.seed, progress, evidence=evidence, unknowns=d * d + d)
        heads = unknown_head(evidence)
        try:
            profile = run.probe()
            if profile.num_outputs:
                reason = f"The oracle answers with {profile.num_outputs} numbers; one sign is expected."
                return refuse(run, Status.NOT_APPLICABLE, reason)
            signs = _Signs(evidence)
            v = signs.direction_of_v(self.bits)
            if v is None:
                reason = "No single token is answered with a positive sign, nor its negative: v = 0, and W is free."
                return refuse(run, Status.NOT_IDENTIFIABLE, reason)
            heads.v[0] = v
            W = self._weights(run, signs, v)
            if W is None:
                reason = (
                    "Signs change at no scale of the tokens as one head's would: W is too large, or this is no head."
                )
                return refuse(run, Status.NOTHING_FOUND, reason)
            heads.W[0] = W
            margin = min(max(_MARGIN * 2.0**-self.bits, 1e-11), 0.3)
            certificate = signs.certificate(heads, margin, run.generator)
            if not certificate.holds:
                certificate, cost = run.charge(certificate, 2 * _NUM_BOUNDARY)
                wrong = certificate.residual
                reason = f"{wrong:.0%} of the signs beside the boundary are wrong: this is not a single head."
                return Recovery(no_heads(evidence), Status.NOTHING_FOUND, reason, certificate, cost)

            def wrong_at(length: int) -> float:
                return signs.wrong_beside(heads, margin, length, 1, run.generator)

            lengths = ask_other_lengths(run, wrong_at, 0.0)
            certificate, cost = run.charge(lengths.extend(certificate), 2 * _NUM_BOUNDARY + lengths.num_queries)
        except BudgetSpent as spent:
            return out_of_budget(run, heads, spent)
        except Refused as seen:
            return refuse(run, Status.NOTHING_FOUND, f"Token norms are not free: {seen}.")
        reason = f"W and the direction of v to {self.bits} bits; signs do not determine |v|, which is given as 1."
        status = Status.RECOVERED if lengths.agree else Status.PARTIAL
        searches = searches_of(Aim.WEIGHTS, unconfirmed=not lengths.agree)
        return Recovery(heads, status, f"{reason}{lengths.remark}", certificate, cost, ("answers",), searches)

    def _weights(self, run: QueryRun, signs: _Signs, v: Float[Tensor, " d"]) -> Float[Tensor, "d d"] | None:
        """W by W y_j for all y_j that lean away from v; None where every scale saturates."""
        left, right = BoostedProbes.random(v, run.generator), BoostedProbes.random(v, run.generator)
        U, Y = left.directions, -right.directions
        scale = signs.scale(U, Y, v, run.generator)
        if scale is None:
            return None
        if math.isinf(scale):
            return torch.zeros_like(U)
        images: list[Tensor] = []
        for block in Y.split(columns_at_once(signs.evidence, len(U))):
            run.progress("columns of W", sum(map(len, images)), len(U))
            values = signs.all_scores(U.repeat(len(block), 1), block.repeat_interleave(len(U), 0), v, scale, self.bits)
            images.append(left.solve(values.reshape(len(block), len(U))))
        return right.solve(-torch.cat(images).T)


@dataclass(frozen=True, eq=False)
class _Signs:
    """Questions that are answered by a sign, and bisections of many numbers at once."""

    evidence: OracleEvidence

    def __call__(self, sequences: Sequences) -> Bool[Tensor, " b"]:
        return self.evidence.ask(sequences) > 0

    def direction_of_v(self, bits: int) -> Float[Tensor, " d"] | None:
        """v̂: signs, the largest entry by d − 1 comparisons in rounds, the ratios to it by bisection."""
        unit = torch.eye(self.evidence.width, dtype=torch.float64, device=self.evidence.device)
        signed = torch.where(self(unit[:, None]), 1.0, -1.0)[:, None] * unit
        places = list(range(len(unit)))
        while len(places) > 1:
            first, second = places[0 : len(places) // 2 * 2 : 2], places[1::2]
            wins = self((signed[first] - signed[second])[:, None]).tolist()
            places = [a if win else b for a, b, win in zip(first, second, wins, strict=True)] + places[2 * len(first) :]
        largest = places[0]
        if not bool(self(signed[largest][None, None])):
            return None
        others = [place for place in range(len(unit)) if place != largest]
        ratios = unit.new_ones(len(unit))
        if others:
            asked = signed[others]
            ratios[others] = bisect(
                lambda rho: self((asked - rho[:, None] * signed[largest])[:, None]), len(others), 0.0, 1.0, bits
            ).to(ratios)
        v = ratios @ signed
        return v / v.norm()

    def scores(
        self, U: Float[Tensor, "b d"], Y: Float[Tensor, "b d"], v: Float[Tensor, " d"], scale: float, bits: int
    ) -> Float[Tensor, " b"]:
        """uᵀWy of each pair to `bits` bits of 16/scale; ±8/scale where it is beyond."""
        U = math.sqrt(scale) * U
        Y = math.sqrt(scale) * Y
        ratio = (U @ v) / -(Y @ v)

        def is_above(t: Float[Tensor, " b"]) -> Bool[Tensor, " b"]:
            eta = (ratio * t.to(ratio).sigmoid()).sqrt()[:, None]
            return self(torch.stack([U / eta + eta * Y, eta * Y], dim=1))

        return bisect(is_above, len(U), -_WIDEST, _WIDEST, bits).to(U) / scale

    def scale(
        self, U: Float[Tensor, "d d"], Y: Float[Tensor, "d d"], v: Float[Tensor, " d"], generator: torch.Generator
    ) -> float | None:
        """s at which scores have deviation about 1, from a few pairs and a few bits at each try.

        Infinity where no score shows at any scale, None where none is small enough.
        """
        scale = math.sqrt(len(U))
        while _SMALLEST_SCALE < scale < _LARGEST_SCALE:
            u, y = torch.randint(len(U), (2, _PILOT_PAIRS), generator=generator)
            t = (self.scores(U[u], Y[y], v, scale, _PILOT_BITS) * scale).abs()
            if float(t.median()) > 0.9 * _WIDEST:
                scale /= _PILOT_STEP
            elif float(t.max()) < _LEAST_SEEN:
                scale *= _PILOT_STEP
            else:
                return scale / float(t.square().mean().sqrt())
        return math.inf if scale >= _LARGEST_SCALE else None

    def all_scores(
        self, U: Float[Tensor, "b d"], Y: Float[Tensor, "b d"], v: Float[Tensor, " d"], scale: float, bits: int
    ) -> Float[Tensor, " b"]:
        """uᵀWy of each pair; those beyond what the scale shows are bisected again at a smaller one."""
        values = self.scores(U, Y, v, scale, bits)
        beyond = values.abs() * scale > 0.999 * _WIDEST
        while beyond.any() and scale > _SMALLEST_SCALE:
            scale /= _PILOT_STEP
            values[beyond] = self.scores(U[beyond], Y[beyond], v, scale, bits)
            beyond = values.abs() * scale > 0.999 * _WIDEST
        return values

    def certificate(self, heads: HeadWeights, margin: float, generator: torch.Generator) -> Certificate:
        """The share of wrong signs on both sides of the learned boundary."""
        wrong = self.wrong_beside(heads, margin, FRESH_LENGTH, _NUM_BOUNDARY, generator)
        claim = (
            f"No sign depends on |v|. Of {2 * _NUM_BOUNDARY} fresh sequences of {FRESH_LENGTH} tokens, {margin:.1e} "
            "of an answer from where it changes its sign, every sign is the oracle's."
        )
        return Certificate(claim, wrong, 0.0, details={"margin": margin})

    def wrong_beside(
        self, heads: HeadWeights, margin: float, length: int, count: int, generator: torch.Generator
    ) -> float:
        """The share of wrong signs beside the boundary, at `count` places on it; two questions each."""
        d = heads.v.shape[1]
        drawn = max(count, _FEWEST_DRAWN)  # for the size of answers
        X = torch.randn(2, drawn, length, d, generator=generator, dtype=torch.float64).to(heads.W)
        X = (
            X / X.norm(dim=3, keepdim=True) * (2 * d / max(float(heads.W.norm()), 1e-24)) ** 0.5
        )  # scores of the order of 1
        # f(−X) = −f(X), so each sequence is positive or its negative is.
        above, below = (torch.where(heads(x) > 0, 1.0, -1.0)[:, None, None] * x for x in (X[0], X[1]))
        below = -below
        size = float(torch.cat([heads(above), heads(below)]).square().mean().sqrt())
        above, below = above[:count], below[:count]

        def between(part: Float[Tensor, " b"]) -> Sequences:
            return above + part.to(above)[:, None, None] * (below - above)

        crossing = bisect(lambda part: heads(between(part)).cpu() > 0, count, 0.0, 1.0, 52)
        slope = (heads(between(crossing + 1e-6)) - heads(between(crossing - 1e-6))).cpu().abs() / 2e-6
        step = margin * size / slope
        beside = torch.cat([between(crossing - step), between(crossing + step)])
        return float((self(beside) != (heads(beside) > 0)).double().mean())


def bisect(
    is_above: Callable[[Float[Tensor, " b"]], Bool[Tensor, " b"]], count: int, low: float, high: float, bits: int
) -> Float[Tensor, " b"]:
    """Numbers between low and high that can be compared with others, to (high − low)/2^(bits + 1)."""
    lows = torch.full((count,), low, dtype=torch.float64)
    width = high - low
    for _ in range(bits):
        width /= 2
        lows = torch.where(is_above(lows + width).cpu(), lows + width, lows)
    return lows + width / 2
