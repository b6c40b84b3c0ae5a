"""Every (token, position, type) that can be an input of the first block, with its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.models.adapter import Model

Text = tuple[int, ...]  # places, position by position


@dataclass(frozen=True)
class Frame:
    """How texts begin and end: the first and the last token, and the type of the part that ends them (pairs: 1)."""

    first: int
    last: int
    end_type: int = 0


@dataclass(frozen=True)
class PositionCandidates:
    """Places in a fixed order: all tokens of a position together, type by type.

    `share`: how much of the token's gradient arrives at the position (1: it stands there and nowhere else).
    Queries carry the factor that scores are scaled with, and what positions add to scores, b(p, p'), where they add
    something: ⟨(q, b(p, ·)), (k, e_p')⟩ = ⟨q, k⟩ + b(p, p').
    """

    frame: Frame
    tokens: Int[Tensor, " t"]
    num_positions: int
    num_types: int
    share: Float[Tensor, " j"]
    rows: Float[Tensor, "j d"]
    queries: Float[Tensor, "j h e"]
    keys: Float[Tensor, "j h e"]
    values: Float[Tensor, "j h e"]

    @classmethod
    def of(
        cls,
        model: Model,
        tokens: Int[Tensor, " t"],
        shares: Float[Tensor, "p t"],
        frame: Frame,
        type_shares: Float[Tensor, "k t"] | None = None,
    ) -> PositionCandidates:
        """All places of `tokens` at the positions that `shares` has rows for, of the types that the frame has.

        The share of a place is its position's times its type's: exact for tokens that stand at one place only.
        """
        num_positions, num_types = len(shares), frame.end_type + 1
        position, kind, token = torch.meshgrid(
            torch.arange(num_positions), torch.arange(num_types), torch.arange(len(tokens)), indexing="ij"
        )
        position, kind, token = (axis.flatten().to(tokens.device) for axis in (position, kind, token))
        rows = model.first_input(tokens[token], position, kind)
        queries, keys, values = model.queries_keys_values(0, rows, position)
        scaled = queries * model.scores_scale(0)
        bias = model.score_bias(0, num_positions)
        if bias is not None:
            scaled = torch.cat([scaled, bias.transpose(0, 1)[position].to(scaled)], dim=-1)
            units = torch.eye(num_positions).to(keys)[position]
            keys = torch.cat([keys, units[:, None].expand(-1, keys.shape[1], -1)], dim=-1)
        share = shares[position, token]
        if type_shares is not None:
            share = share * type_shares[kind, token]
        return cls(frame, tokens, num_positions, num_types, share, rows, scaled, keys, values)

    @property
    def num_candidates(self) -> int:
        """Number of places."""
        return len(self.share)

    @cached_property
    def token(self) -> Int[Tensor, " j"]:
        """The token of each place."""
        return self.tokens.repeat(self.num_positions * self.num_types)

    @cached_property
    def position(self) -> Int[Tensor, " j"]:
        """The position of each place."""
        positions = torch.arange(self.num_positions, device=self.tokens.device)
        return positions.repeat_interleave(self.num_types * len(self.tokens))

    @cached_property
    def kind(self) -> Int[Tensor, " j"]:
        """The type of each place."""
        kinds = torch.arange(self.num_types, device=self.tokens.device).repeat_interleave(len(self.tokens))
        return kinds.repeat(self.num_positions)

    @cached_property
    def is_end(self) -> Bool[Tensor, " j"]:
        """Places that end a text."""
        return self.closes & (self.kind == self.frame.end_type)

    @cached_property
    def closes(self) -> Bool[Tensor, " j"]:
        """Places that close a part of a text: the end, and in a pair the token between its two texts."""
        return (self.token == self.frame.last) & (self.position > 0)

    @cached_property
    def is_frame(self) -> Bool[Tensor, " j"]:
        """Places of the tokens that frame every text."""
        return (self.token == self.frame.first) | (self.token == self.frame.last)

    @cached_property
    def start(self) -> int:
        """The place that begins every text."""
        return int(((self.token == self.frame.first) & (self.position == 0) & (self.kind == 0)).nonzero()[0, 0])

    @cached_property
    def is_possible(self) -> Bool[Tensor, " j"]:
        """Places that a text may use: the first token opens it and does not come again, and every part is closed."""
        opening = torch.arange(self.num_candidates, device=self.tokens.device) == self.start
        to_come = self.frame.end_type - self.kind + (~self.closes).int()  # tokens that must still follow
        inner = (self.token != self.frame.first) & (self.position > self.kind)
        return torch.where(self.position == 0, opening, inner & (self.position + to_come < self.num_positions))

    def fit(self, place: int, other: int) -> bool:
        """Whether two places may stand in one text: a later type at a later position, with room for a closing token."""
        steps = int(self.position[place] - self.position[other])
        types = int(self.kind[place] - self.kind[other])
        return steps != 0 and (types == 0 or types * steps > 1)

    def tokens_of(self, text: Text) -> tuple[int, ...]:
        """The tokens of a text that is given as places."""
        return tuple(self.token[list(text)].tolist())

    def alternatives(self, place: int) -> Int[Tensor, " c"]:
        """All places at the same position and of the same type, frame tokens left out."""
        first = place - place % len(self.tokens)
        block = torch.arange(first, first + len(self.tokens), device=self.tokens.device)
        return block[~self.is_frame[block]]
