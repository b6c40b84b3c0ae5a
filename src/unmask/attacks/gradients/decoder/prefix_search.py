"""Decoders: grow every text token by token, keeping a prefix only if its row lies in the span of a check site.

    prefixes ← tokens whose one-token row is in the span
    repeat: for every prefix × candidate token at the next position
                row ← attention of the candidate over the prefix's cached keys and values
                keep the extension if ‖row − UUᵀrow‖ / ‖row‖ is on the zero side of the gap

Notation: U basis of the site's span; a prefix of length i holds keys and values (i, heads, d_head).
Limits: needs fewer distinct prefixes than the width. A text that is a prefix of another ends invisibly here, and a
text counts once however often it occurs (`endings.py` tells both).
Cost: an extension costs one attention row of k + 32 numbers, which estimate its distance from the span and its length:
values are multiplied by the probes before they are mixed. Only survivors get a float64 distance. At hidden units of an
MLP, rows of m units are enough to refuse an extension: m − b directions of them are orthogonal to the span.
Source: DAGER, arXiv 2405.15586, Algorithm 2. Deviation: the check is at block 0's output projection, not at block 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.gradients.decoder.prefix_rows import Growth, NextTokens, Prefixes
from unmask.attacks.gradients.sites import SpanSite
from unmask.attacks.run import Run
from unmask.linalg.gap import Gap, widest_gap
from unmask.linalg.quick_products import multiply_quickly, screens_in_few_digits
from unmask.linalg.subspace import Span
from unmask.models.adapter import Model
from unmask.models.hidden_units import keep_hidden_units
from unmask.models.linear import Role
from unmask.proof.arrivals import is_repetition

# A wrong extension's relative distance is of order 0.1 to 1; nearer ones are looked at in float64.
_SHORTLIST = 0.1
# Probes estimate a distance up to this factor.
_ESTIMATE_MARGIN = 2.0
# No cut is finer than this: screening has few digits, and on some machines fewer.
_FINEST, _FINEST_OF_FEW_DIGITS = 1e-3, 1e-2
# Random directions that tell the length of a row, to about an eighth.
_NUM_LENGTHS = 32
# Hidden units beyond the rank of their span, and the share of all from which on they are not told apart.
_SPARE_UNITS, _MOST_UNITS = 128, 0.8
# How long a prefix that only repeats its first token is carried while nothing else grows (see `_close`).
_REPETITION_PATIENCE = 8


Node = tuple[int, tuple[int, ...]]  # a prefix: where it starts, and its tokens


@dataclass(frozen=True)
class Forest:
    """All accepted prefixes. `nodes` maps a prefix to its distance; leaves end a branch."""

    nodes: dict[Node, float]
    leaves: list[Node]
    gap: Gap
    num_tested: int
    overflow: bool = False  # more prefixes passed than the rank allows: the test does not separate

    def is_clear(self, min_gap_decades: float) -> bool:
        """Whether the distances of accepted and refused prefixes stand far apart."""
        return not self.overflow and self.gap.decades >= min_gap_decades

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The tokens of the leaves."""
        return [tokens for _, tokens in self.leaves]

    @property
    def longest(self) -> int:
        """Tokens of the longest leaf."""
        return max(map(len, self.texts))

    def num_rows(self, model: Model) -> int:
        """Prefixes with a row of their own."""
        return sum(not is_repetition(model, node[1]) for node in self.nodes)

    def explains(self, rank: int, model: Model) -> bool:
        """Whether the prefixes account for every direction of a gradient: then nothing that left a trace is missing."""
        return not self.overflow and self.num_rows(model) == rank


@dataclass
class PrefixSearch:
    """One search; settings first, then what it has seen so far."""

    run: Run
    model: Model
    site: SpanSite
    candidates: Candidates
    num_probes: int
    memory_budget_bytes: int
    gap: Gap = field(default_factory=lambda: Gap(0.0, _SHORTLIST))
    num_tested: int = 0
    nodes: dict[Node, float] = field(default_factory=dict)
    leaves: list[Node] = field(default_factory=list)
    following: NextTokens | None = None  # of the position before

    @torch.no_grad()
    def search(self) -> Forest:
        """Grow from every position at which a text starts: 0, or later ones under left padding."""
        span = self.site.span
        self.growth = self.screening = Growth.at_site(self.site, self.model, self.memory_budget_bytes)
        seen = self._screen_by_units() or span
        share = (span.width - span.rank) * seen.width / max(1, (seen.width - span.rank) * span.width)
        probes = seen.probes(self.num_probes, self.run.generator) * share**0.5  # of a row of length 1 in all units
        lengths = torch.randn(seen.width, _NUM_LENGTHS, generator=self.run.generator).to(probes) / _NUM_LENGTHS**0.5
        screen = torch.cat([probes, seen.scale(lengths.T).T], dim=1)
        self.screen = screen.to(self.model.device, self.model.dtype)
        few_digits = screens_in_few_digits(self.screen, self.growth.has_hidden_rows)
        self.finest = _FINEST_OF_FEW_DIGITS if few_digits else _FINEST
        for position in sorted(max(position, 0) for position in self.candidates.by_position):
            starts = self._starts(position)
            if len(starts) and not self._grow(starts):
                return self._forest(overflow=True)
            if self._forest(overflow=False).explains(span.rank, self.model):
                break  # later starts, which only left padding has, would have left a trace
        self._drop_ghost_starts()
        inner = {(start, tokens[:length]) for start, tokens in self.nodes for length in range(1, len(tokens))}
        self.leaves = [leaf for leaf in self.leaves if leaf not in inner]  # 't' in front of 't t x' ends no branch
        return self._forest(overflow=False)

    def _screen_by_units(self) -> Span | None:
        """The span at some hidden units, which are screened then; None where rows are none, or all are needed."""
        span = self.site.span
        num_units = span.rank + _SPARE_UNITS
        if self.site.layers != ((Role.MLP_OUT, 0),) or num_units > _MOST_UNITS * span.width:
            return None
        units = torch.randperm(span.width, generator=self.run.generator)[:num_units].to(self.model.device)
        part = keep_hidden_units(self.growth.model, units)
        if part is None:
            return None
        self.screening = Growth(part, self.site.rows, num_units, self.memory_budget_bytes)
        return span.at(units)

    def _forest(self, overflow: bool) -> Forest:
        return Forest(self.nodes, self.leaves, self.gap, self.num_tested, overflow)

    def _drop_ghost_starts(self) -> None:
        """Take out first tokens that lead nowhere, if they are exactly as many as the prefixes exceed the rank.

        With learned positions, token + position is a sum: where texts start at several positions (left padding), the
        first token of one may pass at the start of another. Its row depends on theirs, so it adds nothing to the rank.
        """
        surplus = self._forest(overflow=False).num_rows(self.model) - self.site.span.rank
        alone = [leaf for leaf in self.leaves if len(leaf[1]) == 1]
        if 0 < surplus == len(alone):
            self.leaves = [leaf for leaf in self.leaves if leaf not in alone]
            for leaf in alone:
                del self.nodes[leaf]

    def _starts(self, position: int) -> Prefixes:
        """First tokens at a position."""
        first = self.growth.at(position, self.candidates.at(position).to(self.model.device))
        distances = self.site.span.distance(self.growth.first_rows(first))
        self.num_tested += len(first)
        self.gap = self.gap.narrow(distances) if self.nodes else widest_gap(distances, ceiling=_SHORTLIST)
        keep = (distances <= self.gap.threshold).nonzero()[:, 0]
        for token, distance in zip(first.tokens[keep].tolist(), distances[keep].tolist(), strict=True):
            self.nodes[position, (token,)] = distance
        return self.growth.begin(first, keep)

    def _grow(self, alive: Prefixes) -> bool:
        """Extend until nothing passes; False if more passes than the span's rank can explain."""
        idle = 0
        while len(alive):
            following = self._following(alive)
            if len(following) == 0:
                self._close(alive, set())
                return True
            parents, extended, distances = self._extensions(alive, following)
            children = [(alive.start, tuple(row)) for row in extended.tokens.tolist()]
            own = [not is_repetition(self.model, child[1]) for child in children]
            self.nodes.update((child, d) for child, d, is_own in zip(children, distances, own, strict=True) if is_own)
            self._close(alive, {parent for parent, is_own in zip(parents.tolist(), own, strict=True) if is_own})
            idle = 0 if any(own) else idle + 1
            if idle > _REPETITION_PATIENCE or len(self.nodes) > 2 * self.site.span.rank + 2:
                return idle > _REPETITION_PATIENCE
            self.run.progress("growing prefixes", len(self.nodes), self.site.span.rank)
            alive = extended
        return True

    def _close(self, alive: Prefixes, extended: set[int]) -> None:
        """Prefixes that nothing extends are leaves; a repetition with a child becomes a prefix in its own right.

        The values of 't t … t' are all equal, so without absolute positions every position has the very row of 't':
        no test can tell how often t stands there until another token follows. Such prefixes are carried along.
        """
        for index, row in enumerate(alive.tokens.tolist()):
            key = alive.start, tuple(row)
            if index not in extended and key in self.nodes:
                self.leaves.append(key)
            elif index in extended and key not in self.nodes:
                for length in range(2, len(row) + 1):
                    self.nodes.setdefault((alive.start, tuple(row[:length])), self.nodes[alive.start, (row[0],)])

    def _following(self, alive: Prefixes) -> NextTokens:
        tokens = self.candidates.at(alive.next_position).to(self.model.device)
        fits = alive.next_position < self.model.max_positions
        position, tokens = (alive.next_position, tokens) if fits else (0, tokens[:0])
        self.following = self.growth.at(position, tokens, self.following)
        return self.following

    def _extensions(self, alive: Prefixes, following: NextTokens) -> tuple[Tensor, Prefixes, list[float]]:
        """Accepted extensions with the places of their parents and their float64 distances."""
        cut = max(self.finest, _ESTIMATE_MARGIN * self.gap.threshold)
        while True:
            found, far, bounds = self._measure(alive, following, cut)
            gap = self.gap.narrow(torch.cat([far, bounds]))
            if _ESTIMATE_MARGIN * gap.threshold <= cut:
                break
            cut = _ESTIMATE_MARGIN * gap.threshold  # rows that were not looked at may be on the near side of this gap
        self.gap = gap
        self.num_tested += len(alive) * len(following)
        kept = found[far <= gap.threshold]
        extended = self.growth.extend(alive, following, kept[:, 0], kept[:, 1])
        return kept[:, 0], extended, far[far <= gap.threshold].tolist()

    def _measure(self, alive: Prefixes, following: NextTokens, cut: float) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs of a prefix and a token whose rows seem nearer than `cut`, and their distances in float64.

        All pairs are screened: by a few random products of each row, of hidden units by some of them, on a GPU in few
        digits. Third, of the nearest of all others, what they are away at least.
        """
        shortlist = min(_SHORTLIST, _ESTIMATE_MARGIN * self.gap.rejected)
        pairs, distances, bounds = [], [], []
        for begin, products in self._screen(alive, following):
            outside, lengths = products.split([products.shape[-1] - _NUM_LENGTHS, _NUM_LENGTHS], dim=-1)
            estimates = outside.norm(dim=-1) / lengths.norm(dim=-1)
            bounds.append(estimates[(estimates >= cut) & (estimates < shortlist)] / _ESTIMATE_MARGIN)
            pairs.append((estimates < cut).nonzero() + torch.tensor([begin, 0], device=estimates.device))
            for some in pairs[-1].split(self.growth.rows_at_once):
                exact = self.growth.rows_of_extensions(alive, following, some[:, 0], some[:, 1])
                distances.append(self.site.span.distance(exact))
        return torch.cat(pairs), torch.cat(distances), torch.cat(bounds)

    def _screen(self, alive: Prefixes, following: NextTokens) -> Iterator[tuple[int, Tensor]]:
        """Products of the rows of all pairs, chunk by chunk."""
        chunks = self.screening.extension_products(alive, following, self.screen)
        while True:
            with multiply_quickly():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
