"""Coordinate moves: exchange one token of a text at a time, wherever that lowers the residual of its rows most.

Probes of the output projection's gradient vanish on the attention outputs of the batch; the residual of a text is what
they leave on all its rows. Exchanging the token at position p changes one key and value for every
row, and all of row p; with the denominators and numerators of attention kept, all tokens of the batch are tried at p in
one pass.

Notation: L rows of a text, c candidates, h heads, k probes; e (i, j, h) = e^{q_i·k_j}.
Cost: c·L·h·k for all candidates of a position; some of the k probes choose a few exchanges, and all of them decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.encoder.position_candidates import PositionCandidates, Text
from unmask.shapes import Probes

_HIGHEST_SCORE = 60.0  # e^60 is still far from float32's end
_LEAST_GAIN = 1e-4
_NUM_COARSE_PROBES = 16  # that choose
_NUM_LIKELY = 6  # exchanges whose cost is then told by all probes


@dataclass(frozen=True)
class TokenSwaps:
    """Moves on texts; `values` are the probes of every place's value vector, head by head."""

    places: PositionCandidates
    queries: Float[Tensor, "j h e"]
    keys: Float[Tensor, "j h e"]
    values: Float[Tensor, "j h k"]

    @classmethod
    def of(cls, places: PositionCandidates, probes: Probes) -> TokenSwaps:
        """With probes of the output projection's gradient, in their precision."""
        by_head = probes.unflatten(0, places.values.shape[1:])
        values = torch.einsum("jhe,hek->jhk", places.values.to(probes), by_head)
        return cls(places, places.queries.to(probes), places.keys.to(probes), values)

    def cost(self, text: Text) -> float:
        """Mean squared residual of a text's rows."""
        return float(self.row_costs(text).mean())

    def row_costs(self, text: Text) -> Float[Tensor, " i"]:
        """Squared residual of each row."""
        state = _State.of(self, text)
        return (state.sums / state.totals[..., None]).sum(1).square().sum(1)

    def improve(self, text: Text, max_sweeps: int, enough: float = 0.0) -> tuple[Text, float]:
        """The text after moves that each lower the cost until it is `enough`, and its cost; frame tokens stay."""
        cost = self.cost(text)
        for _ in range(max_sweeps * len(text)):
            if cost <= enough:
                break
            best = self._best_exchange(text, self._coarse)
            if best is None or not best[0] < cost * (1 - _LEAST_GAIN):
                break
            cost, text = best
        return text, cost

    def runner_up(self, text: Text) -> Text | None:
        """The best text that differs in one token; certificates rest on it, so all probes choose."""
        best = self._best_exchange(text, self)
        return None if best is None else best[1]

    def _best_exchange(self, text: Text, coarse: TokenSwaps) -> tuple[float, Text] | None:
        """The best text that differs in one token, and its cost: coarse probes choose a few, all of them decide."""
        state = _State.of(coarse, text)
        likely: list[tuple[float, Text]] = []
        for position in self._inner(text):
            candidates, costs = coarse._moves(state, text, position)
            costs = costs.masked_fill(candidates == text[position], float("inf"))
            for index in costs.topk(min(_NUM_LIKELY, len(costs)), largest=False).indices.tolist():
                other = (*text[:position], int(candidates[index]), *text[position + 1 :])
                likely.append((float(costs[index]), other))
        likely = sorted(one for one in likely if one[0] < float("inf"))[:_NUM_LIKELY]
        return min(((self.cost(other), other) for _, other in likely), default=None)

    @cached_property
    def _coarse(self) -> TokenSwaps:
        """The same with the first of the probes alone."""
        return replace(self, values=self.values[..., :_NUM_COARSE_PROBES].contiguous())

    def _inner(self, text: Text) -> list[int]:
        """Positions of tokens that frame nothing."""
        return [position for position, place in enumerate(text) if not bool(self.places.is_frame[place])]

    def moves(self, text: Text, position: int) -> tuple[Int[Tensor, " c"], Float[Tensor, " c"]]:
        """Candidates for a position, and the cost of the text with each of them there."""
        return self._moves(_State.of(self, text), text, position)

    def _moves(self, state: _State, text: Text, position: int) -> tuple[Int[Tensor, " c"], Float[Tensor, " c"]]:
        candidates = self.places.alternatives(text[position])
        queries, keys, values = self.tables(candidates)
        old, new = state.attention[:, position], _exponentials(keys, state.queries)  # (L, h), (c, L, h)
        totals = (state.totals - old + new).reciprocal()
        rest = state.sums - old[..., None] * state.values[position]
        residual = torch.einsum("cih,ihk->cik", totals, rest) + torch.einsum("cih,chk->cik", new * totals, values)
        residual[:, position] = self._own_row(state, position, queries, keys, values)
        return candidates, residual.square().sum((1, 2)) / len(text)

    @staticmethod
    def _own_row(state: _State, position: int, queries: Tensor, keys: Tensor, values: Tensor) -> Float[Tensor, "c k"]:
        """The row of the exchanged position itself: another query, its own new key and value."""
        attention = _exponentials(queries, state.keys)  # (c, L, h)
        attention[:, position] = _clip((queries * keys).sum(-1)).exp()
        others = torch.cat([state.values[:position], torch.zeros_like(state.values[:1]), state.values[position + 1 :]])
        sums = torch.einsum("cjh,jhk->chk", attention, others) + attention[:, position, :, None] * values
        return (sums / attention.sum(1)[..., None]).sum(1)

    def tables(self, places: Int[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (n, h, e) and probed values (n, h, k) of some places."""
        return self.queries[places], self.keys[places], self.values[places]


@dataclass(frozen=True)
class _State:
    """Attention of a text's rows, with its denominators and numerators."""

    queries: Float[Tensor, "i h e"]
    keys: Float[Tensor, "i h e"]
    values: Float[Tensor, "i h k"]
    attention: Float[Tensor, "i j h"]
    totals: Float[Tensor, "i h"]
    sums: Float[Tensor, "i h k"]

    @classmethod
    def of(cls, exchange: TokenSwaps, text: Text) -> _State:
        places = torch.tensor(text, device=exchange.values.device)
        queries, keys, values = exchange.tables(places)
        attention = _exponentials(queries, keys)
        sums = torch.einsum("ijh,jhk->ihk", attention, values)
        return cls(queries, keys, values, attention, attention.sum(1), sums)


def _exponentials(left: Float[Tensor, "c h e"], right: Float[Tensor, "i h e"]) -> Float[Tensor, "c i h"]:
    return _clip(torch.einsum("che,ihe->cih", left, right)).exp()


def _clip(scores: Tensor) -> Tensor:
    return scores.clamp(-_HIGHEST_SCORE, _HIGHEST_SCORE)
