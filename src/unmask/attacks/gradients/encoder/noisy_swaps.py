"""Coordinate moves under noise: exchange one token of a text at a time, by what noise leaves of a row at each layer.

`token_swaps.py` asks the output projection's probes alone, which noise blurs first. Here every candidate text runs
through block 0. The cost of a row is the mean over layers of its squared distance to the span, over what noise leaves
of a row of the batch: 1 for a right text, if noise has swallowed none of its directions.

A candidate changes its own row, and others as far as they attend to it. So the candidates of a position are compared by
their own rows and by those that attend to the position most, with the sums of the attention over all other tokens made
once; the best one is then asked on all rows.

Limits: it is no proof; a text that noise blurs may be nearer with a wrong token.
Cost: of a candidate, the output projection and the spans for a few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.problem import Problem
from unmask.attacks.gradients.sites import SpanSite
from unmask.linalg.noisy_span import NoisySpan

_LEAST_GAIN = 1e-4  # of the cost, in a move
_LEAST_SWEEP = 1e-2  # the same in a sweep over all positions
_LARGEST = 1e4  # more says no more of a row
_LEAST_LEFT = 1e-6  # of a row's squared length, that noise leaves: float32 leaves as much
_AT_ONCE = 64  # texts of a forward pass
_MOST_CUT = 4  # tokens that a text may be shortened by
_NUM_READERS = 12  # rows that attend to a position most, by which its candidates are compared


@dataclass(frozen=True)
class NoisySwaps:
    """Moves on texts over the places that are `likely`."""

    problem: Problem
    likely: Int[Tensor, " c"]

    def costs(self, texts: Int[Tensor, "n i"]) -> Float[Tensor, " n"]:
        """The cost of texts of one length."""
        return torch.cat([self.row_costs(part).mean(1) for part in texts.split(_AT_ONCE)])

    def row_costs(self, texts: Int[Tensor, "n i"]) -> Float[Tensor, "n i"]:
        """The cost of each row."""
        places, model = self.problem.places, self.problem.model
        positions = places.position[texts]
        states = model.embed(places.token[texts], positions, places.kind[texts])
        mixed = model.mixed_values(0, states, positions, torch.ones_like(positions, dtype=torch.bool))
        return self._costs_of(states, mixed)

    def _costs_of(self, states: Float[Tensor, "*n d"], mixed: Float[Tensor, "*n o"]) -> Float[Tensor, "*n"]:
        """The cost of rows with these streams and mixed values."""
        costs = []
        for site, noise in self._sites:
            far, left = noise.squares(site.rows(self.problem.model, states, mixed))
            costs.append((far / left.clamp_min(_LEAST_LEFT)).clamp_max(_LARGEST))
        return torch.stack(costs).mean(0)

    def compare(self, text: Int[Tensor, " i"], index: int, options: Int[Tensor, " c"]) -> Float[Tensor, " c"]:
        """What each option at one position of a text costs in its own row and in those that attend to it most."""
        others = torch.cat([text[:index], text[index + 1 :]])
        queries, keys, values, streams = self._parts
        scores = torch.einsum("ihe,jhe->ihj", queries[others], keys[others])
        to_option = torch.einsum("ihe,che->ihc", queries[others], keys[options])
        highest = torch.maximum(scores.amax(-1), to_option.amax(-1))[..., None]
        shares, to_option = (scores - highest).exp(), (to_option - highest).exp()
        whole = shares.sum(-1, keepdim=True)
        readers = (to_option / (whole + to_option)).mean((1, 2)).topk(min(_NUM_READERS, len(others))).indices
        shares, to_option, whole = shares[readers], to_option[readers], whole[readers]
        sums = torch.einsum("ihj,jhe->ihe", shares, values[others])
        added = torch.einsum("ihc,che->cihe", to_option, values[options])
        mixed = (sums + added) / (whole + to_option).permute(2, 0, 1)[..., None]
        own_scores = torch.einsum("che,jhe->chj", queries[options], keys[others])
        to_self = (queries[options] * keys[options]).sum(-1, keepdim=True)
        own = torch.cat([own_scores, to_self], dim=-1).softmax(-1)
        own_mixed = torch.einsum("chj,jhe->che", own[..., :-1], values[others]) + own[..., -1:] * values[options]
        states = torch.cat([streams[others[readers]].expand(len(options), -1, -1), streams[options][:, None]], dim=1)
        return self._costs_of(states, torch.cat([mixed, own_mixed[:, None]], dim=1).flatten(2)).mean(1)

    @cached_property
    def _sites(self) -> list[tuple[SpanSite, NoisySpan]]:
        """The layers that are asked, with their spans in the model's precision."""
        # The down projection's rows cost most and tell least.
        cheap = [site for site in (self.problem.output, self.problem.mlp) if site is not None]
        sites = cheap or self.problem.sites
        return [(site, site.noise.to(self.problem.model.dtype)) for site in sites if site.noise is not None]

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and the stream of every place, in the model's precision."""
        places, model = self.problem.places, self.problem.model
        streams = model.embed(places.token[:, None], places.position[:, None], places.kind[:, None])[:, 0]
        queries, keys, values = (part.to(model.dtype) for part in (places.queries, places.keys, places.values))
        return queries, keys, values, streams

    def improve(self, text: Text, max_sweeps: int) -> tuple[Text, float]:
        """The text after sweeps over all positions, and moves of its end, while that helps."""
        current = torch.tensor(text, device=self.likely.device)
        current, cost = self._move_end(current, float(self.costs(current[None])[0]))
        for _ in range(max_sweeps):
            before = cost
            current, cost = self._sweep(current, cost)
            current, cost = self._move_end(current, cost)
            if cost > before * (1 - _LEAST_SWEEP):
                break
        return tuple(current.tolist()), cost

    def _sweep(self, text: Int[Tensor, " i"], cost: float) -> tuple[Int[Tensor, " i"], float]:
        """The best token of each position, the best position first: one wrong token must not change the others."""
        before = text
        changed = torch.cat([self._with_best(text, index) for index in range(1, len(text) - 1)] or [text[None][:0]])
        for other in changed[self.costs(changed).argsort()] if len(changed) else changed:
            text, cost = self._take_best(text, cost, torch.where(other != before, other, text)[None])
        return text, cost

    def _take_best(
        self, current: Int[Tensor, " i"], cost: float, texts: Int[Tensor, "n l"]
    ) -> tuple[Int[Tensor, " l"], float]:
        """The best of some texts, if it is better than the current one."""
        costs = self.costs(texts) if len(texts) else torch.ones(0)
        if len(costs) == 0 or float(costs.min()) >= cost * (1 - _LEAST_GAIN):
            return current, cost
        return texts[int(costs.argmin())], float(costs.min())

    def _with_best(self, text: Int[Tensor, " i"], index: int) -> Int[Tensor, "n i"]:
        """The text with the best of likely tokens at one of its positions; nothing if that is the one it has."""
        options = self._options(int(text[index]))
        if len(options) < 2:
            return text[None][:0]
        changed = text.clone()
        changed[index] = options[int(self.compare(text, index, options).argmin())]
        return changed[None] if bool((changed != text).any()) else text[None][:0]

    def _move_end(self, text: Int[Tensor, " i"], cost: float) -> tuple[Int[Tensor, " i"], float]:
        """The text that ends a little earlier, or one token later, if that is better."""
        places, length = self.problem.places, len(text)
        ends = {int(places.position[end]): end for end in (places.is_end & places.is_possible).nonzero()[:, 0].tolist()}
        shorter = [
            torch.cat([text[:at], text.new_tensor([ends[at]])])
            for at in range(max(2, length - _MOST_CUT), length - 1)
            if at in ends
        ]
        longer = []
        if length in ends:
            inner = self._options(int(text[-1]))
            end = torch.full_like(inner, ends[length])
            longer = [torch.cat([text[:-1].repeat(len(inner), 1), inner[:, None], end[:, None]], dim=1)]
        for texts in (*(other[None] for other in shorter), *longer):
            text, cost = self._take_best(text, cost, texts)
        return text, cost

    def _options(self, place: int) -> Int[Tensor, " c"]:
        """Likely places at the same position and of the same type."""
        others = self.problem.places.alternatives(place)
        return others[torch.isin(others, self.likely)]
