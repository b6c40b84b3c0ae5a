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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
_WEAKEST = -4.0  # standard deviations; no weaker extension is kept
_SKETCH = 96  # random combinations of each part: they tell its size to 15 %
_MEASURED = 48  # tokens behind a prefix that are measured in full, and as many that tell what is usual
_EXACT = 1e-4  # a ratio this small is no chance: the known rows now determine the rest


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
        self.whiten = self._whitening(generator)
        self.seen = torch.linalg.qr(self.whiten.T @ gradient_basis)[0]
        self.num_tested = 0

    def levels(self, known: dict[tuple[int, ...], Tensor]) -> Iterator[dict[tuple[int, ...], Tensor]]:
        """All rows taken as known after each level, starting from those that are known already."""
        taken = dict(known)
        alive: Prefixes | None = None
        scores = torch.zeros(1)
        for level in range(self.growth.model.max_positions):
            tokens = self.candidates.at(level).to(self.growth.model.device)
            if len(tokens) == 0 or (alive is not None and len(alive) == 0):
                return
            following = self.growth.at(level, tokens)
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
            rows = self.growth.rows_of_prefixes(prefixes).double()
            second_moment += rows.T @ rows
            count += len(rows)
        second_moment /= count
        second_moment.diagonal().add_(_RIDGE * second_moment.diagonal().mean())
        inverse_factor = torch.linalg.inv(torch.linalg.cholesky(second_moment))
        return inverse_factor.T.contiguous()

    def _test_matrix(self, taken: dict[tuple[int, ...], Tensor]) -> tuple[Tensor, int]:
        """W·[GO | NO]: the part of span(G) outside the known rows, then what is outside of both."""
        known = torch.stack([row.double() @ self.whiten for row in taken.values()]).T if taken else self.seen[:, :0]
        known = known / known.norm(dim=0)
        frame = torch.linalg.qr(torch.cat([known, self.seen], dim=1), mode="complete")[0]
        return (self.whiten @ frame[:, known.shape[1] :]).to(self.growth.model.dtype), self.seen.shape[1]

    def _ratios(self, alive: Prefixes | None, following: NextTokens, test: tuple[Tensor, int]) -> _Ratios:
        """log of the share of each extension that lies outside span(G, known rows).

        A sketch of both parts ranks the tokens behind a prefix; the best of them, and a sample that tells what is
        usual, are measured in full.
        """
        matrix, rank = test
        inside, outside = matrix.split([rank, matrix.shape[1] - rank], dim=1)
        num_tokens = len(following)
        sketch = torch.cat([_combine(inside, self.generator), _combine(outside, self.generator)], dim=1)
        num_measured = max(_MEASURED, 3 * self.num_texts // (1 if alive is None else len(alive)))
        usual = torch.arange(0, num_tokens, max(1, num_tokens // _MEASURED), device=matrix.device)
        ratios, samples = [], []
        for _, rows in self._extensions(alive, following):
            if alive is None or num_tokens <= 2 * num_measured or matrix.shape[1] <= 4 * _SKETCH:
                ratios.append(_share_outside(rows @ matrix, rank))
                samples.append(ratios[-1])
            else:
                best = _share_outside(rows @ sketch, _SKETCH).topk(num_measured, largest=False).indices
                named = rows.gather(1, best[..., None].expand(-1, -1, rows.shape[-1]))
                samples.append(_share_outside(rows[:, usual] @ matrix, rank))
                rest = rows.new_full(rows.shape[:2], float("inf"))
                ratios.append(rest.scatter(1, best, _share_outside(named @ matrix, rank)))
            self.num_tested += rows.shape[0] * rows.shape[1]
        return _Ratios(torch.cat(ratios).cpu(), torch.cat(samples).cpu())

    def _extensions(self, alive: Prefixes | None, following: NextTokens) -> Iterable[tuple[int, Tensor]]:
        if alive is None:
            return [(0, self.growth.first_rows(following)[None])]
        return self.growth.extension_rows(alive, following)

    def _choose(
        self,
        ratios: _Ratios,
        inherited: Float[Tensor, " s"],
        alive: Prefixes | None,
        tokens: Int[Tensor, " c"],
        known: dict[tuple[int, ...], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs (prefix, token) that go on, and their scores."""
        scores = ratios.standardise()
        sure = self._already_known(alive, tokens, known, scores.shape)
        exact = (ratios.values < torch.tensor(_EXACT).log()) & ~sure
        scores[sure] = 2 * scores.min()
        total = scores + _MEMORY * inherited[:, None]
        limit = int(_BEAM * self.num_texts) + 1
        if alive is not None and 0.2 * min(len(alive), self.num_texts) <= int(exact.sum()) <= 3 * self.num_texts:
            chosen = (exact | sure).flatten().nonzero()[:, 0]
        else:
            allowed = _worth_keeping(scores) & (scores < _WEAKEST)
            ranked = total.masked_fill(~(allowed | sure), float("inf")).flatten()
            chosen = ranked.argsort()[: max(limit, int(sure.sum()) + self.num_texts // 3)]
            chosen = chosen[torch.isfinite(ranked[chosen])]
        floor = total.flatten()[chosen].median() * 2 if len(chosen) else total.min()
        return chosen // len(tokens), chosen % len(tokens), total.flatten()[chosen].clamp_min(float(floor))

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
    """Ratios of every prefix with every token, infinite where a sketch has ruled a token out, and of a sample."""

    values: Float[Tensor, "s c"]
    sample: Float[Tensor, "s m"]

    def standardise(self) -> Float[Tensor, "s c"]:
        """Deviations from the median token behind the same prefix, in robust standard deviations of all."""
        usual = self.sample.median(1, keepdim=True).values
        deviation = 1.4826 * (self.sample - usual).abs().median() + 1e-6  # 1.4826: of a normal variable
        return (self.values - usual) / deviation


def _share_outside(projected: Float[Tensor, "s c k"], rank: int) -> Float[Tensor, "s c"]:
    """log of ‖outside‖² / (‖inside‖² + ‖outside‖²), the first `rank` coordinates being inside."""
    inside, outside = projected.split([rank, projected.shape[-1] - rank], dim=-1)
    seen, unseen = inside.square().sum(-1), outside.square().sum(-1)
    return (unseen / (seen + unseen)).clamp_min(1e-12).log()


def _combine(matrix: Float[Tensor, "f k"], generator: torch.Generator) -> Float[Tensor, "f m"]:
    """Random combinations of columns: ‖x·M‖² of any x is estimated by them."""
    return matrix @ (torch.randn(matrix.shape[1], _SKETCH, generator=generator).to(matrix) / _SKETCH**0.5)


def _worth_keeping(scores: Float[Tensor, "s c"]) -> Tensor:
    """The best token behind each prefix, and others that come near it: branches are rarer than false tokens."""
    best = scores.min(1, keepdim=True).values
    if len(scores) == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    return (scores == best) | ((scores < 0.8 * best.median()) & (scores < 0.6 * best))
