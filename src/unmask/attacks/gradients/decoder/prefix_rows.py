"""Prefixes that grow over block 0, with cached keys and values: an extension costs one attention row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.gradients.sites import RowsOf, SpanSite, attention_output
from unmask.linalg.quick_products import multiply_quickly
from unmask.models.adapter import Model
from unmask.models.attention_calls import KnownRows
from unmask.models.fused import fuse_activations

_NEAR_CACHE_BYTES = 2**27  # of hidden rows on a processor: more is asked of the system anew for each activation


@dataclass(frozen=True)
class NextTokens:
    """Tokens that may stand at a position: their stream, queries, keys and values in block 0."""

    position: int
    tokens: Int[Tensor, " c"]
    states: Float[Tensor, "c d"]
    queries: Float[Tensor, "c h e"]
    keys: Float[Tensor, "c g e"]
    values: Float[Tensor, "c g e"]
    known: KnownRows

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of equal length that start at one position, with the keys and values of block 0."""

    start: int
    tokens: Int[Tensor, "s i"]
    keys: Float[Tensor, "s i g e"]
    values: Float[Tensor, "s i g e"]

    @property
    def next_position(self) -> int:
        """Where the next token stands."""
        return self.start + self.tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Growth:
    """Rows of extended prefixes at one layer, in chunks that fit a memory budget."""

    model: Model
    rows_of: RowsOf
    row_width: int
    memory_budget_bytes: int

    @classmethod
    def at_site(cls, site: SpanSite, model: Model, memory_budget_bytes: int) -> Growth:
        """Rows of a site; those that pass through activations are made with quick ones."""
        quick = model if site.rows is attention_output else fuse_activations(model)
        return cls(quick, site.rows, site.span.width, memory_budget_bytes)

    def at(self, position: int, tokens: Int[Tensor, " c"], before: NextTokens | None = None) -> NextTokens:
        """What block 0 makes of tokens at a position; `before` is the same at another one.

        Without learned positions only the last step depends on them.
        """
        positions = torch.full_like(tokens, position)
        if before is not None and not self.model.learned_positions and torch.equal(before.tokens, tokens):
            states, known = before.states, before.known
        else:
            states = self.model.embed(tokens, positions)
            known = KnownRows(self.model.attention_input(0, states))
        heads = self.model.queries_keys_values(0, known.rows, positions, known)
        return NextTokens(position, tokens, states, *heads, known)

    def begin(self, first: NextTokens, columns: Int[Tensor, " s"]) -> Prefixes:
        """One-token prefixes."""
        keys, values = first.keys[columns, None], first.values[columns, None]
        return Prefixes(first.position, first.tokens[columns, None], keys, values)

    def first_rows(self, first: NextTokens) -> Float[Tensor, "c f"]:
        """Rows of one-token prefixes: a first token attends to itself alone."""
        itself = first.keys[:, None], first.values[:, None]
        everything = torch.ones(len(first.tokens), 1, 1, dtype=torch.bool, device=first.tokens.device)
        return self.rows_of(
            self.model, first.states, self.model.mix(0, first.queries[:, None], *itself, everything)[:, 0]
        )

    def extension_rows(self, prefixes: Prefixes, following: NextTokens) -> Iterator[tuple[int, Float[Tensor, "s c f"]]]:
        """Rows of every prefix extended by every token, as (index of the first prefix, rows) chunk by chunk.

        They are there to be screened: what follows attention, whose scores want all digits, is made of fewer.
        """
        own = following.queries, following.keys, following.values
        for begin, chunk in self._chunks(prefixes, following, self.row_width):
            mixed = self.model.mix_behind(0, *own, prefixes.keys[chunk], prefixes.values[chunk])
            with multiply_quickly(large=True):
                rows = self.rows_of(self.model, following.states.expand(len(mixed), -1, -1), mixed)
            yield begin, rows

    def extension_products(
        self, prefixes: Prefixes, following: NextTokens, matrix: Float[Tensor, "f k"]
    ) -> Iterator[tuple[int, Float[Tensor, "s c k"]]]:
        """The same rows multiplied by a matrix; rows of attention are never formed for that."""
        if self.has_hidden_rows:
            yield from ((begin, rows @ matrix) for begin, rows in self.extension_rows(prefixes, following))
            return
        own = following.queries, following.keys, following.values
        for begin, chunk in self._chunks(prefixes, following, matrix.shape[1]):
            yield begin, self.model.mix_behind(0, *own, prefixes.keys[chunk], prefixes.values[chunk], matrix)

    def extend(
        self, prefixes: Prefixes, following: NextTokens, parents: Int[Tensor, " n"], columns: Int[Tensor, " n"]
    ) -> Prefixes:
        """Longer prefixes: each parent with the token of its column."""
        return Prefixes(
            prefixes.start,
            torch.cat([prefixes.tokens[parents], following.tokens[columns, None]], dim=1),
            torch.cat([prefixes.keys[parents], following.keys[columns, None]], dim=1),
            torch.cat([prefixes.values[parents], following.values[columns, None]], dim=1),
        )

    def rows_of_prefixes(self, prefixes: Prefixes) -> Float[Tensor, "s f"]:
        """The row of each prefix's last position."""
        positions = torch.full_like(prefixes.tokens[:, -1], prefixes.next_position - 1)
        states = self.model.embed(prefixes.tokens[:, -1], positions)
        queries, _, _ = self.model.queries_keys_values(0, self.model.attention_input(0, states), positions)
        everything = torch.ones(len(prefixes), 1, prefixes.tokens.shape[1], dtype=torch.bool, device=states.device)
        mixed = self.model.mix(0, queries[:, None], prefixes.keys, prefixes.values, everything)[:, 0]
        return self.rows_of(self.model, states, mixed)

    def rows_of_extensions(
        self, prefixes: Prefixes, following: NextTokens, parents: Int[Tensor, " n"], columns: Int[Tensor, " n"]
    ) -> Float[Tensor, "n f"]:
        """Rows of some pairs of a prefix and a token."""
        return self.rows_of_prefixes(self.extend(prefixes, following, parents, columns))

    @property
    def has_hidden_rows(self) -> bool:
        """Whether rows are made by more than attention, as products of large matrices."""
        return self.rows_of is not attention_output

    @property
    def rows_at_once(self) -> int:
        """How many rows of prefixes fit the budget, keys and values beside them."""
        floats = 4 * self.model.width + 3 * self.row_width
        return max(1, self.memory_budget_bytes // (8 * floats))

    def _chunks(self, prefixes: Prefixes, following: NextTokens, row_width: int) -> Iterator[tuple[int, slice]]:
        """As many prefixes at once as fit the budget, with rows of this width for each of the tokens."""
        floats = 3 * self.model.num_heads * (prefixes.tokens.shape[1] + 1) + 3 * row_width
        budget = self.memory_budget_bytes
        if self.has_hidden_rows:
            floats += 4 * self.model.width
            budget = min(budget, _NEAR_CACHE_BYTES) if self.model.device.type == "cpu" else budget
        step = max(1, budget // (4 * len(following) * floats))
        for begin in range(0, len(prefixes), step):
            yield begin, slice(begin, begin + step)
