"""One head of low rank from its answers: as many queries as a matrix of that rank has degrees of freedom."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.claims import judge_heads
from unmask.attacks.queries.one_head.boosted_probes import (
    BoostedProbes,
    ScoreReader,
    columns_at_once,
    random_basis,
    readable,
)
from unmask.attacks.queries.one_head.probe_scale import read_first
from unmask.attacks.queries.one_head.single_head import (
    check_early,
    column_scale,
    invisible,
    learn_one_head,
    read_block,
)
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.oracles import OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Recovery

# By the error of t: how many columns more than the rank are measured whole, for each of its dimensions and in all; the
# number of checks of a column; and how many times the error of a prediction a mismatch is.
# Columns: r random columns of rank r can be nearly dependent, and their span is used for d columns. That costs float64
# nothing; in float32 one column more is enough; three times as many divide the error of noise by ten at τ = 10⁻⁶.
# Checks: one sees what leaves the span as a Gaussian of deviation about (1/d)^½, and misses it where that falls below
# the threshold: 10⁻¹¹ of cases in float64, 10⁻³ in float32, so that two or three are asked.
# Mismatches: the error of arithmetic is known up to a factor of a few; that of noise better, with less to spare.
_BY_ERROR = ((1e-10, 0, 0, 1, 30), (1e-5, 0, 1, 2, 30), (math.inf, 2, 0, 3, 6))
_SPREAD = 3.0  # a column can be 1 + 3/r times as long as the longest before it, and more in two to four cases of 100


@dataclass(frozen=True)
class LowRankAttack:
    """W of rank r and v of a single head, the rank known or not.

        W y_j for r random orthonormal y_j: d probes each → U, a basis of the column space
        every further y_j:                  r probes in span(U), since W y_j = U·c

    With the rank unknown, each new y_j is asked k probes in the span of what is known and 1 to 3 checks outside of it.
    Where a check disagrees the column is completed: k + checks + rest = d equations, so nothing is wasted.

    Notation: d the width, r the rank, k the rank known so far; probes are those of `BoostedProbes` for the basis of
    all of space whose first vectors are U.
    Limits: singular values below the oracle's error are not seen. Exactly as many equations as unknowns average
    nothing: where answers are noisy, three times the columns are measured whole. v = 0 leaves W undetermined.
    A run whose budget ends knows W in no unit direction, so W stays NaN.
    Cost: d + r(2d − r) learning queries with the rank known; (d − r)·checks more without; d + d² at full rank.
    Source: arXiv 2601.16873, Thm 5.1, has O(rd) by nuclear norm (`NuclearNormAttack`); the adaptive scheme is ours.
    """

    rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the rank."""
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rank must be 1 or more, or None where it is not known, got {self.rank}")

    def __call__(self, evidence: OracleEvidence, progress: Progress = silent) -> Recovery[HeadWeights]:
        """Learn, and check on fresh sequences."""
        d = evidence.width
        if self.rank is not None and self.rank > d:
            raise InputError(f"rank must be at most the width {d}, got {self.rank}")
        run = QueryRun(self.seed, progress, evidence=evidence, unknowns=d * d + d)
        return learn_one_head(run, self._learn)

    def _learn(self, run: QueryRun, reader: ScoreReader, heads: HeadWeights) -> Recovery[HeadWeights]:
        d = len(reader.v)
        columns = _Columns(reader, random_basis(d, run.generator).to(reader.v), run)
        run.num_probing += columns.start()
        if not columns.is_zero:
            columns.read_all(self.rank)
        heads.W[0] = columns.images @ columns.Y
        run.unknowns = columns.rank * (2 * d - columns.rank) + d
        reason = f"v from {d} one-token queries, and W of rank {columns.rank} from two-token queries."
        return judge_heads(run, heads, reader.fresh_boost, reason)


@dataclass
class _Columns:
    """W·Y, column by column: those measured whole, and those that lie in their span."""

    reader: ScoreReader
    Y: Float[Tensor, "d d"]  # orthonormal rows
    run: Run
    images: Float[Tensor, "d d"] = field(init=False)  # column j is W y_j
    whole: list[int] = field(default_factory=list)
    is_zero: bool = False
    span: Float[Tensor, "d k"] = field(init=False)  # of the whole columns, by their singular values
    values: Float[Tensor, " k"] = field(init=False)

    def __post_init__(self) -> None:
        self.images = torch.full_like(self.Y, math.nan)
        self.span, self.values = self.Y[:, :0], self.Y[0, :0]

    @property
    def rank(self) -> int:
        return self.span.shape[1]

    def start(self) -> int:
        """The first column, whole; the number of questions that were asked only to be sure."""
        probes = BoostedProbes.random(self.reader.v, self.run.generator)
        found = read_first(self.reader, probes, self.Y, self.run.generator)
        if found is None:
            self.images[:] = invisible(self.reader)
            self.is_zero = True
            return 0
        first, values = found
        self.images[:, first] = probes.solve(readable(values)[None])[0]
        num_early = check_early(self.reader, self.Y[first], self.images[:, first], self.run.generator)
        self._now_whole([first], None)
        return num_early

    def read_all(self, rank: int | None) -> None:
        """All columns, the rank given or found on the way."""
        times, more, num_checks, _ = self._caution()
        if rank is not None:
            self._read_whole(rank - 1 + times * rank, rank)
            times, more, num_checks = 0, 0, 0
        size = 1
        is_wide = times + more == 0
        while left := self._left():
            self.run.progress("columns of W", len(self.Y) - len(left), len(self.Y))
            now = left[: min(size, columns_at_once(self.reader.pairs.evidence, self.rank + num_checks))]
            agree = self._read_in_span(now, num_checks, completed=not is_wide)
            if agree and not is_wide:
                self._read_whole(times * self.rank + more - len(now), self.rank)
                is_wide = True
            size = 2 * size if agree else 1

    def _read_whole(self, count: int, rank: int) -> None:
        """More columns by d probes each; their span is cut to the given rank."""
        now = self._left()[:count]
        if now:
            probes = BoostedProbes.random(self.reader.v, self.run.generator)
            self.images[:, now] = read_block(self.reader, probes, self.Y[now], self._scale())
        self._now_whole(now, rank)

    def _read_in_span(self, now: list[int], num_checks: int, completed: bool) -> bool:
        """Columns as combinations of what is known; whole where a check disagrees or if asked to. Did all agree?"""
        k, reader = self.rank, self.reader
        basis = self._basis(num_checks > 0)
        inside, every = BoostedProbes(basis[:k], reader.v), BoostedProbes(basis, reader.v)
        U = every.directions[: k + num_checks]
        scale = self._scale()
        near = scale * math.sqrt(k / len(self.Y))  # in the span the same norm is shared by k scores, not by d
        scales = torch.cat([U.new_full([k], near), U.new_full([len(U) - k], scale)])
        Y = self.Y[now]
        values = reader.scores(U.repeat(len(now), 1), Y.repeat_interleave(len(U), 0), scales.repeat(len(now)))
        values = readable(values).reshape(len(now), len(U))
        images = inside.solve(values[:, :k])
        off = (values[:, k:] - images @ U[k:].T).abs()
        # How much of an error inside of the span a prediction outside of it takes over.
        passed_on = (inside.solve(torch.eye(k).to(U)) @ U[k:].T).norm(dim=0)
        # A combination of whole columns has their errors as often as it holds them.
        held = (1 + (images @ self.span / self.values).square().sum(1)).sqrt()
        error = held[:, None] * reader.error(scale) / scale + passed_on * reader.error(near) / near
        allowed = self._caution()[-1] * error
        disagrees = (off > allowed).any(1)
        to_complete = disagrees | completed
        places = torch.tensor(now)
        self.images[:, places[~to_complete]] = images[~to_complete].T
        if to_complete.any():
            others = places[to_complete].tolist()
            rest, Y = every.directions[len(U) :], self.Y[others]
            more = reader.scores(rest.repeat(len(others), 1), Y.repeat_interleave(len(rest), 0), scale)
            more = readable(more).reshape(len(others), len(rest))
            self.images[:, others] = every.solve(torch.cat([values[to_complete], more], dim=1)).T
            self._now_whole(others, None if disagrees.any() else k)
        return not bool(disagrees.any())

    def _now_whole(self, places: list[int], rank: int | None) -> None:
        """The span of all columns that were measured whole, the strongest directions first."""
        self.whole += places
        left, values, _ = torch.linalg.svd(self.images[:, self.whole], full_matrices=False)
        if rank is None:
            noise = self.reader.error(self._scale()) / self._scale() * math.sqrt(len(self.Y))
            rank = max(1, int((values > self._caution()[-1] * noise).sum()))
        self.span, self.values = left[:, :rank], values[:rank]

    def _basis(self, complemented: bool) -> Float[Tensor, "m d"]:
        """The span, turned at random so that no direction stands out, and the rest of space behind it."""
        turn = random_basis(self.rank, self.run.generator).to(self.span)
        inside = self.span @ turn
        if not complemented:
            return inside.T
        d = len(self.Y)
        others = torch.randn(d, d - self.rank, generator=self.run.generator, dtype=torch.float64).to(self.span)
        outside = torch.linalg.qr(torch.cat([inside, others], dim=1))[0][:, self.rank :]
        return torch.cat([inside, outside], dim=1).T

    def _caution(self) -> tuple[int, int, int, int]:
        """The line of `_BY_ERROR` that the oracle's error asks for; noise is averaged wherever it shows."""
        error = self.reader.error(self._scale())
        is_noisy = self.reader.profile.absolute_error > 0 and error > _BY_ERROR[0][0]
        lines = _BY_ERROR[-1:] if is_noisy else _BY_ERROR
        return next((times, more, checks, factor) for limit, times, more, checks, factor in lines if error <= limit)

    def _left(self) -> list[int]:
        return self.images[0].isnan().nonzero()[:, 0].tolist()

    def _scale(self) -> float:
        """Where digits are to spare, lower for small ranks: norms of images then differ, and none should saturate."""
        scale = column_scale(self.images[:, self.images[0].isfinite()])
        is_exact = self.reader.error(scale) <= _BY_ERROR[0][0]
        return scale / (1 + _SPREAD / max(1, self.rank)) if is_exact else scale
