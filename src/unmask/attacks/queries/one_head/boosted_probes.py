"""The probes of every single-head learner: leaning towards v, as long as tokens may be, never saturating."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.pairs import Pairs, logit
from unmask.attacks.queries.profile import OracleProfile
from unmask.evidence.oracles import OracleEvidence

MEMORY_BYTES = 2**26  # of sequences in one ask
MOST_READABLE = 5.0  # |t|: beyond it σ is so flat that more than two digits are lost
_READABLE = 1.5  # |t| where an answer tells most of it
_FLAT = 10.0  # σ is 0 or 1 from |t| = 16 on in float32, 36 in float64; noise hides it before, so there less is changed
_NUM_ATTEMPTS = 12
_LEAN = 4.0  # √(L/η) without added errors: v·y is then a small part of an answer, and nothing cancels
_WITHIN = 0.999  # of the largest norm: rounding must not carry a token over it
# The answer to a one-token query is |v_i|·norm. Longer tokens do no harm, so three decades are to spare for small v.
_SMALL_ANSWER = 1e-3


class NotOneHead(Exception):  # noqa: N818 (an ending, not an error)
    """The answers are not those of one head; the sentence says what was seen."""


@dataclass(frozen=True, eq=False)
class BoostedProbes:
    """Unit probes that all lean towards v, one for each vector of an orthonormal basis.

        u_i = (b_i + v̂)/√(2(1 + β_i)),   β_i = b_iᵀv̂ ≥ 0,   so v·u_i ≥ |v|/√2

    and, with a_i = √(2(1 + β_i))·u_iᵀw = b_iᵀw + v̂ᵀw, w in the span of the basis is

        w = Σ_i (a_i − γ)·b_i,   γ = v̂ᵀw = Σ_i β_i a_i / (1 + Σ_i β_i)

    Notation: v̂ = v/|v|; b_i the rows of `basis` (k, d), turned so that β_i ≥ 0.
    Limits: nothing is divided by an entry of v, so no margin is needed, only v ≠ 0. The inverse has norm at most
    2(1 + √k); for a random basis it is about 2, since Σβ grows as √k.
    Source: ours; arXiv 2601.16873, Thm 4.1, uses random or unit vectors and pays with the smallest |v_i|.
    """

    basis: Float[Tensor, "k d"]
    v: Float[Tensor, " d"]

    @classmethod
    def random(cls, v: Float[Tensor, " d"], generator: torch.Generator) -> BoostedProbes:
        """For all of space. Random, so that a sparse W has no entry that stands out."""
        return cls(random_basis(len(v), generator).to(v), v)

    @property
    def unit_v(self) -> Float[Tensor, " d"]:
        """v̂."""
        return self.v / self.v.norm()

    @property
    def turned(self) -> Float[Tensor, "k d"]:
        """The basis, each vector on v's side."""
        sign = torch.where(self.basis @ self.v < 0, -1.0, 1.0).to(self.basis)
        return sign[:, None] * self.basis

    @property
    def directions(self) -> Float[Tensor, "k d"]:
        """The probes u_i."""
        leaning = self.turned + self.unit_v
        return leaning / leaning.norm(dim=1, keepdim=True)

    def solve(self, values: Float[Tensor, "m k"]) -> Float[Tensor, "m d"]:
        """w for each row of u_iᵀw, for w in the span of the basis."""
        turned = self.turned
        lean = turned @ self.unit_v
        sums = values * (turned + self.unit_v).norm(dim=1)
        along_v = sums @ lean / (1 + lean.sum())
        return (sums - along_v[:, None]) @ turned


@dataclass(frozen=True, eq=False)
class ScoreReader:
    """Reads uᵀWy, one query each: t = logit(F(Lu, ηy)/(L·v·u)), uᵀWy = t/(Lη).

    The score depends on the scale s = L·η alone. How it is shared is free, and an error that the oracle adds to
    answers is divided by L. So L is as large as the oracle's added error asks for and norms allow (L + η ≤ M);
    without added errors L/η = 16 is enough. Where |t| > 5 the same is asked again at a smaller s.

    Notation: u, y unit vectors; L, η the norms that they are asked with; M the largest norm of a token.
    Limits: s ≤ M²/4. Values that no scale makes readable (answers outside of what one head gives) are NaN.
    Source: arXiv 2601.16873, §4; the sharing is the symmetry of `Pairs`, ours.
    """

    pairs: Pairs
    profile: OracleProfile
    longest: float

    @property
    def v(self) -> Float[Tensor, " d"]:
        """v as it was measured."""
        return self.pairs.sum_v

    @property
    def wanted_norm(self) -> float:
        """L that makes added errors as small as those of the arithmetic; 0 where nothing is added."""
        return choose_norm(self.profile, float(self.v.norm()) / 2) if self.profile.absolute_error > 0 else 0.0

    @property
    def fresh_boost(self) -> float:
        """How much longer than scores ask for the tokens of fresh sequences should be."""
        return max(1.0, self.wanted_norm)

    @property
    def largest_scale(self) -> float:
        """The largest s that norms allow."""
        return self.longest**2 / 4

    def norms(self, scale: Float[Tensor, " b"]) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """L and η for each scale; L + η = M at the longest, where L = (M + √(M² − 4s))/2."""
        scale = scale.clamp(max=self.largest_scale)
        longest = (self.longest + (self.longest**2 - 4 * scale).clamp_min(0).sqrt()) / 2
        long = (_LEAN * scale.sqrt()).clamp_min(self.wanted_norm).minimum(longest)
        return long, scale / long

    def error(self, scale: float) -> float:
        """The standard deviation of t at t = 0: σ' = 1/4 there, and v·u is |v|/√2 or more."""
        long, short = self.norms(torch.tensor([scale], dtype=torch.float64))
        size = float(self.v.norm()) * float(long) / math.sqrt(2)
        cancelled = 1 + float(short / long)
        return 4 * (self.profile.precision * cancelled + self.profile.absolute_error / size)

    def scores(
        self, U: Float[Tensor, "b d"], Y: Float[Tensor, "b d"], scale: float | Float[Tensor, " b"]
    ) -> Float[Tensor, " b"]:
        """uᵀWy of each pair of rows."""
        s = torch.as_tensor(scale, dtype=U.dtype, device=U.device).expand(len(U)).clone().clamp(max=self.largest_scale)
        values = torch.full_like(s, math.nan)
        left = torch.arange(len(U), device=U.device)
        for _ in range(_NUM_ATTEMPTS):
            t = self.read(U[left], Y[left], s[left])
            is_read = t.isfinite() & (t.abs() < MOST_READABLE)
            values[left[is_read]] = t[is_read] / s[left[is_read]]
            left = left[~is_read]
            if len(left) == 0:
                break
            flat = 3.0 if self.profile.absolute_error > 0 else _FLAT
            s[left] *= torch.where(t.isfinite(), _READABLE / t.abs(), 1 / flat)[~is_read]
        return values

    def read(self, U: Float[Tensor, "b d"], Y: Float[Tensor, "b d"], s: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """t of each pair, asked once; not finite where the answer is not one of a single readable head."""
        long, short = self.norms(s)
        U, Y = long[:, None] * U, short[:, None] * Y
        return logit(self.pairs(U, Y) / (U @ self.v))


def choose_norm(profile: OracleProfile, answer: float) -> float:
    """The norm of a token that makes added errors as small as those of the arithmetic, for answers of this size.

    Where errors are added and norms are bounded, what the profile takes for the arithmetic's error is the rest of the
    added one, so the longest token is wanted.
    """
    is_bounded = profile.absolute_error > 0 and math.isfinite(profile.max_norm)
    return profile.max_norm if is_bounded else profile.boost(answer, 1.0)


def measure_v(
    evidence: OracleEvidence, profile: OracleProfile, basis: Float[Tensor, "d d"] | None = None
) -> Float[Tensor, " d"]:
    """v by d queries of one token, f([L·b_i]) = L·vᵀb_i, with L as long as the oracle's added error asks for.

    Notation: b_i orthonormal, the rows of `basis`; unit vectors without one.
    """
    norm = min(choose_norm(profile, _SMALL_ANSWER), _WITHIN * profile.max_norm)
    if basis is None:
        basis = torch.eye(evidence.width, dtype=torch.float64, device=evidence.device)
    return evidence.ask(norm * basis[:, None]) @ basis / norm


def score_reader(evidence: OracleEvidence, profile: OracleProfile, v: Float[Tensor, " d"]) -> ScoreReader:
    """The reader of an oracle whose v was measured."""
    return ScoreReader(Pairs(evidence, v), profile, _WITHIN * profile.max_norm)


def readable(values: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The same values, if all of them were readable."""
    if not values.isfinite().all():
        share = float((~values.isfinite()).double().mean())
        raise NotOneHead(f"{share:.0%} of the answers are none that a single head with this v gives at any scale.")
    return values


def random_basis(width: int, generator: torch.Generator) -> Float[Tensor, "d d"]:
    """Orthonormal rows, uniformly distributed up to signs."""
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0].T.contiguous()


def columns_at_once(evidence: OracleEvidence, queries_a_column: int) -> int:
    """How many columns one ask may hold: what memory allows, and what the budget pays for; at least one."""
    fitting = MEMORY_BYTES // (2 * 8 * evidence.width * queries_a_column)
    ledger = evidence.ledger
    if ledger.budget is not None:
        fitting = min(fitting, (ledger.budget - len(ledger)) // queries_a_column)
    return max(1, fitting)
