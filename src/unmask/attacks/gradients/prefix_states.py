"""Inputs of several layers at the end of a prefix, with cached keys and values of every block below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.models.adapter import Model
from unmask.models.linear import Role

# A layer: its block, and what its input is: that of the queries (so of keys and values too), of the output projection
# or of the MLP.
Layer = tuple[int, Role]
INPUTS = (Role.QUERY, Role.ATTENTION_OUT, Role.MLP_IN)


@dataclass(frozen=True)
class CachedPrefix:
    """A prefix, with its keys and values at each block below the highest one that is looked at."""

    tokens: tuple[int, ...]
    keys: tuple[Float[Tensor, "i g e"], ...]
    values: tuple[Float[Tensor, "i g e"], ...]


@dataclass(frozen=True)
class Extensions:
    """Prefixes that are one token longer: their last rows at each layer looked at, keys and values at each block."""

    rows: list[Float[Tensor, "c d"]]
    keys: tuple[Float[Tensor, "c g e"], ...]
    values: tuple[Float[Tensor, "c g e"], ...]


@dataclass(frozen=True)
class PrefixStates:
    """Rows of prefixes at some layers, in the order of the forward pass."""

    model: Model
    layers: tuple[Layer, ...]

    def begin(self) -> CachedPrefix:
        """The empty prefix."""
        nothing = self.extend(CachedPrefix((), (), ()), torch.zeros(0, dtype=torch.long, device=self.model.device))
        return CachedPrefix((), nothing.keys, nothing.values)

    @torch.no_grad()
    def extend(self, prefix: CachedPrefix, tokens: Int[Tensor, " c"]) -> Extensions:
        """The prefix followed by each of some tokens: every one of these sees the prefix and itself."""
        positions = torch.full_like(tokens, len(prefix.tokens))
        states = self.model.embed(tokens, positions)
        rows, keys, values = [], [], []
        for block, roles in self._roles():
            seen = self.model.attention_input(block, states)
            rows += [seen] if Role.QUERY in roles else []
            if (block, Role.QUERY) == self.layers[-1]:
                break
            q, k, v = self.model.queries_keys_values(block, seen, positions)
            before = (prefix.keys[block], prefix.values[block]) if prefix.tokens else (k[:0], v[:0])
            mixed = self.model.mix_behind(block, q, k, v, before[0][None], before[1][None])[0]
            rows += [mixed] if Role.ATTENTION_OUT in roles else []
            attended = self.model.after_attention(block, states, mixed)
            rows += [self.model.mlp_input(block, attended)] if Role.MLP_IN in roles else []
            states = self.model.after_mlp(block, attended)
            keys.append(k)
            values.append(v)
        return Extensions(rows, tuple(keys), tuple(values))

    def cache(self, prefix: CachedPrefix, token: int, extensions: Extensions, column: int) -> CachedPrefix:
        """The prefix that is longer by the token of a column."""
        keys, values = (
            tuple(torch.cat([old, new[column : column + 1]]) for old, new in zip(before, after, strict=True))
            for before, after in ((prefix.keys, extensions.keys), (prefix.values, extensions.values))
        )
        return CachedPrefix((*prefix.tokens, token), keys, values)

    @torch.no_grad()
    def draw(self, tokens: Int[Tensor, " c"], num_texts: int, length: int, generator: torch.Generator) -> list[Tensor]:
        """Rows of texts that are drawn from some tokens, all positions of them, at the attention of the blocks."""
        drawn = tokens[torch.randint(len(tokens), (num_texts, length), generator=generator).to(tokens.device)]
        states = self.model.hidden_states(drawn, num_blocks=self.layers[-1][0])
        return [self.model.attention_input(block, states[block]).flatten(0, 1) for block, _ in self.layers]

    def _roles(self) -> Iterator[tuple[int, set[Role]]]:
        """The blocks up to the last layer, and which of their inputs are looked at."""
        for block in range(self.layers[-1][0] + 1):
            yield block, {role for of, role in self.layers if of == block}


def attention_layers(blocks: Sequence[int]) -> tuple[Layer, ...]:
    """The inputs of the attention of some blocks."""
    return tuple((block, Role.QUERY) for block in sorted(blocks))
