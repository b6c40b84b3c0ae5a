"""Coordinate moves under noise: exchange one token of a text at a time, by what noise leaves of a row at each layer.

`token_swaps.py` asks the output projection's probes alone, which noise blurs first. Here every candidate text runs
through block 0. The cost of a row is the mean over layers of its squared distance to the span, over what noise leaves
of a row of the batch: 1 for a right text, if noise has swallowed none of its directions.

Limits: it is no proof; a text that noise blurs may be nearer with a wrong token.
Cost: one block's forward pass for each candidate of a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.problem import Problem

_LEAST_GAIN = 1e-4  # of the cost, in a move
_LEAST_SWEEP = 1e-2  # the same in a sweep over all positions
_LARGEST = 1e4  # more says no more of a row
_LEAST_LEFT = 1e-12  # of a row's squared length, that noise leaves
_AT_ONCE = 64  # texts of a forward pass
_MOST_CUT = 4  # tokens that a text may be shortened by


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
        # The down projection's rows cost most and tell least.
        cheap = [site for site in (self.problem.output, self.problem.mlp) if site is not None]
        costs = []
        for site in cheap or self.problem.sites:
            assert site.noise is not None  # sites of a noisy problem
            far, left = site.noise.squares(site.rows(model, states, mixed))
            costs.append((far / left.clamp_min(_LEAST_LEFT)).clamp_max(_LARGEST))
        return torch.stack(costs).mean(0)

    def improve(self, text: Text, max_sweeps: int) -> tuple[Text, float]:
        """The text after sweeps that give each position its best token and move the end, while that helps."""
        current = torch.tensor(text, device=self.likely.device)
        current, cost = self._move_end(current, float(self.costs(current[None])[0]))
        for _ in range(max_sweeps):
            before = cost
            for index in range(1, len(current) - 1):
                current, cost = self._take_best(current, cost, self._with_others(current, index))
            current, cost = self._move_end(current, cost)
            if cost > before * (1 - _LEAST_SWEEP):
                break
        return tuple(current.tolist()), cost

    def _take_best(
        self, current: Int[Tensor, " i"], cost: float, texts: Int[Tensor, "n l"]
    ) -> tuple[Int[Tensor, " l"], float]:
        """The best of some texts, if it is better than the current one."""
        costs = self.costs(texts) if len(texts) else torch.ones(0)
        if len(costs) == 0 or float(costs.min()) >= cost * (1 - _LEAST_GAIN):
            return current, cost
        return texts[int(costs.argmin())], float(costs.min())

    def _with_others(self, text: Int[Tensor, " i"], index: int) -> Int[Tensor, "n i"]:
        """The text with each likely token at one of its positions."""
        options = self._options(int(text[index]))
        texts = text.repeat(len(options), 1)
        texts[:, index] = options
        return texts

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
