"""Batches with more tokens than the width: prefixes that are probably there, found by a soft score.

The down projection of block 0 has inputs A (b, f) with f ≈ 4d, and its gradient G = AᵀΔ has rank d < b. A row of A is
then not in span(G), but it is nearer to it than other vectors: of the b dimensions that rows of A fill, G shows d. In
coordinates in which rows of random prefixes have unit covariance, the share of a row that lies outside span(G, known
rows), relative to what lies outside the known rows alone, is about

    (b − k − d) / (b − k) for a row of the batch,      (f − k − d) / (f − k) for any other row,

k being the number of known rows; it falls to zero once b − k ≤ d. So prefixes are grown by that ratio, and every one
that is taken as known sharpens the test for the next. A false one costs a dimension, not the search.

Notation: f width of the down projection's input, W whitening matrix (f, f).
Limits: b + d well below 2f; token candidates must be known. The result is a hypothesis: `beyond_width.py` verifies it.
Cost: a forward pass through block 0 for every (prefix, token) pair of the first levels, f² multiplications for some.
Source: ours; DAGER (arXiv 2405.15586, Section 6) calls b > d unachievable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.prefix_rows import Growth, NextTokens, Prefixes
from unmask.linalg.quick_products import multiply_quickly

_POOL_PREFIXES, _POOL_LENGTH = 320, 24  # random prefixes whose rows give the covariance
_RIDGE = 1e-3  # of the mean variance
_BEAM = 1.15  # prefixes kept per text: a few false ones cost less than a lost one
_MEMORY = 0.7  # how much of a prefix's score its extension inherits
_WEAKEST = -5.0  # standard deviations; no weaker extension is kept
_BRANCH = -10.0  # the same for a second token behind a prefix
_CLEAR = 0.25  # of the median best token behind a prefix: once rows determine each other, all others are far
_SKETCH = 192  # random combinations of each part: they tell its size to 10 %
_MEASURED = 48  # tokens behind a prefix that are measured in full, and as many that tell what is usual
_POLISHES = 3  # of medians; they settle after two
_ENOUGH_PREFIXES = 8  # to know what is usual of a token


class SoftGrowth:
    """One model, one gradient; passes may be repeated with more rows known."""

    def __init__(
        self,
        growth: Growth,
        gradient_basis: Float[Tensor, "f d"],
        candidates: Candidates,
        num_texts: int,
        generator: torch.Generator,
    ) -> None:
        self.growth = growth
        self.candidates = candidates
        self.num_texts = num_texts
        self.generator = generator
        whiten = self._whitening(generator)
        seen = torch.linalg.qr(whiten.T @ gradient_basis)[0]
        self.whiten, self.seen = whiten.to(growth.model.dtype), seen.to(growth.model.dtype)

    def levels(self, known: dict[tuple[int, ...], Tensor]) -> Iterator[dict[tuple[int, ...], Tensor]]:
        """All rows taken as known after each level, starting from those that are known already."""
        taken = dict(known)
        alive: Prefixes | None = None
        following: NextTokens | None = None
        scores = torch.zeros(1)
        for level in range(self.growth.model.max_positions):
            tokens = self.candidates.at(level).to(self.growth.model.device)
            if len(tokens) == 0 or (alive is not None and len(alive) == 0):
                return
            following = self.growth.at(level, tokens, following)
            test = self._test_matrix(taken)
            with multiply_quickly():
                ratios = self._ratios(alive, following, test)
            parents, columns, scores = self._choose(ratios, scores, alive, tokens.cpu(), known)
            alive = self._advance(alive, following, parents.to(tokens.device), columns.to(tokens.device))
            rows = self.growth.rows_of_prefixes(alive)
            taken.update({tuple(prefix): row for prefix, row in zip(alive.tokens.tolist(), rows, strict=True)})
            if not taken:
                return
            yield taken

    def _whitening(self, generator: torch.Generator) -> Float[Tensor, "f f"]:
        """W with unit covariance of x·W over rows of random prefixes."""
        device = self.growth.model.device
        everyone = torch.tensor(sorted(self.candidates.searched), device=device)
        draw = torch.randint(len(everyone), (_POOL_LENGTH, _POOL_PREFIXES), generator=generator).to(device)
        each = torch.arange(_POOL_PREFIXES, device=device)
        prefixes = self.growth.begin(self.growth.at(0, everyone[draw[0]]), each)
        second_moment = torch.zeros(self.growth.row_width, self.growth.row_width, dtype=torch.float64, device=device)
        count = 0
        for level in range(1, _POOL_LENGTH):
            following = self.growth.at(level, everyone[draw[level]])
            prefixes = self.growth.extend(prefixes, following, each, each)
            rows = self.growth.rows_of_prefixes(prefixes)
            second_moment += (rows.T @ rows).double()
            count += len(rows)
        second_moment /= count
        second_moment.diagonal().add_(_RIDGE * second_moment.diagonal().mean())
        everything = torch.eye(self.growth.row_width, dtype=torch.float64, device=device)
        factor = torch.linalg.cholesky(second_moment)
        return torch.linalg.solve_triangular(factor, everything, upper=False).T.contiguous()

    def _test_matrix(self, taken: dict[tuple[int, ...], Tensor]) -> tuple[Tensor, int]:
        """W·[GO | NO]: the part of span(G) outside the known rows, then what is outside of both."""
        known = (torch.stack(list(taken.values())) @ self.whiten).T if taken else self.seen[:, :0]
        known = known / known.norm(dim=0)
        frame = torch.linalg.qr(torch.cat([known, self.seen], dim=1), mode="complete")[0]
        return self.whiten @ frame[:, known.shape[1] :], self.seen.shape[1]

    def _ratios(self, alive: Prefixes | None, following: NextTokens, test: tuple[Tensor, int]) -> _Ratios:
        """log of the share of each extension that lies outside span(G, known rows).

        A sketch of both parts ranks the tokens behind each prefix, and the best of them are measured in full.
        """
        matrix, rank = test
        num_tokens = len(following)
        if alive is None:
            return _Ratios.of(_share_outside(self.growth.first_rows(following)[None] @ matrix, rank))
        num_measured = max(_MEASURED, 3 * self.num_texts // len(alive))
        is_short = num_tokens <= 2 * num_measured or matrix.shape[1] <= 4 * _SKETCH
        if is_short:
            reduced, num_inside = matrix, rank
        else:
            parts = matrix.split([rank, matrix.shape[1] - rank], dim=1)
            reduced, num_inside = torch.cat([_combine(part, self.generator) for part in parts], dim=1), _SKETCH
        chunks = self.growth.extension_rows(alive, following)
        estimated = _Ratios.of(torch.cat([_share_outside(rows @ reduced, num_inside) for _, rows in chunks]))
        if is_short:
            return estimated
        best = estimated.unexpected.topk(num_measured, largest=False).indices
        usual = torch.arange(0, num_tokens, max(1, num_tokens // _MEASURED), device=best.device)
        measured = torch.cat([best, usual.expand(len(alive), -1)], dim=1)
        parents = torch.arange(len(alive), device=best.device)[:, None].expand_as(measured)
        exact = [
            _share_outside(self.growth.rows_of_extensions(alive, following, *pairs) @ matrix, rank)
            for pairs in zip(*(p.flatten().split(self.growth.rows_at_once) for p in (parents, measured)), strict=True)
        ]
        return estimated.measure(best, usual, torch.cat(exact).view(measured.shape))

    def _choose(
        self,
        ratios: _Ratios,
        inherited: Float[Tensor, " s"],
        alive: Prefixes | None,
        tokens: Int[Tensor, " c"],
        known: dict[tuple[int, ...], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs (prefix, token) that go on, and their scores.

        A false row costs a dimension for good, a row that is missed here is found in the next round, when more rows are
        known: so only clear ones are taken.
        """
        scores = ratios.standardise().cpu()
        sure = self._already_known(alive, tokens, known, scores.shape)
        new = scores.masked_fill(sure, float("inf"))
        best = new.min(1, keepdim=True).values
        usual_best = float(best.median()) if len(best) > 1 else 0.0
        # The first child of a prefix, and branches, which are rarer than false tokens.
        is_first = (new == best) & ~sure.any(1, keepdim=True)
        allowed = (is_first | (new < _BRANCH) | (len(new) == 1)) & (new < min(_WEAKEST, _CLEAR * usual_best))
        total = new + _MEMORY * inherited[:, None]
        ranked = total.masked_fill(~allowed, float("inf")).flatten()
        limit = max(int(_BEAM * self.num_texts) + 1 - int(sure.sum()), self.num_texts // 3)
        chosen = ranked.argsort()[:limit]
        chosen = torch.cat([sure.flatten().nonzero()[:, 0], chosen[torch.isfinite(ranked[chosen])]])
        finite = new[new.isfinite()]
        strong = 2 * float(finite.min()) if len(finite) else 0.0
        total = total.masked_fill(sure, strong).flatten()[chosen]
        floor = float(total.median()) * 2 if len(chosen) else 0.0
        return chosen // len(tokens), chosen % len(tokens), total.clamp_min(floor)

    def _already_known(
        self, alive: Prefixes | None, tokens: Tensor, known: dict[tuple[int, ...], Tensor], shape: torch.Size
    ) -> Tensor:
        sure = torch.zeros(shape, dtype=torch.bool)
        column = {token: index for index, token in enumerate(tokens.tolist())}
        prefixes = [()] if alive is None else [tuple(row) for row in alive.tokens.tolist()]
        row = {prefix: index for index, prefix in enumerate(prefixes)}
        for prefix in known:
            if prefix[:-1] in row and prefix[-1] in column:
                sure[row[prefix[:-1]], column[prefix[-1]]] = True
        return sure

    def _advance(self, alive: Prefixes | None, following: NextTokens, parents: Tensor, columns: Tensor) -> Prefixes:
        if alive is None:
            return self.growth.begin(following, columns)
        return self.growth.extend(alive, following, parents, columns)


@dataclass(frozen=True)
class _Ratios:
    """Ratios of every prefix with every token, infinite where a token was ruled out, and what is usual.

    A token that stands at this position in *any* text of the batch is near the span behind every prefix. So what is
    usual behind a prefix and what is usual of a token are taken out (Tukey's median polish): what is left belongs to
    the pair.
    """

    values: Float[Tensor, "s c"]
    of_prefix: Float[Tensor, "s 1"]
    of_token: Float[Tensor, "1 c"]
    deviation: Float[Tensor, ""]

    @classmethod
    def of(cls, values: Float[Tensor, "s c"]) -> _Ratios:
        """Two-way medians; of tokens only behind enough prefixes."""
        of_prefix, of_token = torch.zeros_like(values[:, :1]), torch.zeros_like(values[:1])
        for _ in range(_POLISHES):
            of_prefix = (values - of_token).median(1, keepdim=True).values
            if len(values) >= _ENOUGH_PREFIXES:
                of_token = (values - of_prefix).median(0, keepdim=True).values
        return cls(values, of_prefix, of_token, _deviation(values - of_prefix - of_token))

    @property
    def unexpected(self) -> Float[Tensor, "s c"]:
        """What is left of the ratios."""
        return self.values - self.of_prefix - self.of_token

    def measure(self, best: Int[Tensor, "s m"], usual: Int[Tensor, " u"], exact: Float[Tensor, "s m_u"]) -> _Ratios:
        """With the ratios of some tokens measured, all others ruled out, and the deviation of the usual ones."""
        values = torch.full_like(self.values, float("inf")).scatter(1, best, exact[:, : best.shape[1]])
        rest = exact[:, best.shape[1] :] - self.of_prefix - self.of_token[:, usual]
        of_prefix = self.of_prefix + rest.median(1, keepdim=True).values
        return replace(self, values=values, of_prefix=of_prefix, deviation=_deviation(rest))

    def standardise(self) -> Float[Tensor, "s c"]:
        """What is left, in robust standard deviations."""
        return self.unexpected / self.deviation


def _deviation(rest: Float[Tensor, "s c"]) -> Float[Tensor, ""]:
    """Of a normal variable with this median of absolute deviations."""
    return 1.4826 * (rest - rest.median()).abs().median() + 1e-6


def _share_outside(projected: Float[Tensor, "*n k"], rank: int) -> Float[Tensor, "*n"]:
    """log of ‖outside‖² / (‖inside‖² + ‖outside‖²), the first `rank` coordinates being inside."""
    inside, outside = projected.split([rank, projected.shape[-1] - rank], dim=-1)
    seen, unseen = inside.square().sum(-1), outside.square().sum(-1)
    return (unseen / (seen + unseen)).clamp_min(1e-12).log()


def _combine(matrix: Float[Tensor, "f k"], generator: torch.Generator) -> Float[Tensor, "f m"]:
    """Random combinations of columns: ‖x·M‖² of any x is estimated by them."""
    return matrix @ (torch.randn(matrix.shape[1], _SKETCH, generator=generator).to(matrix) / _SKETCH**0.5)
