"""Rows of recovered prefixes deeper in the model: one forward pass over the texts gives every prefix's row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.decoder.prefix_search import Forest, Node
from unmask.attacks.gradients.sites import RowsOf
from unmask.models.adapter import Attended, Model
from unmask.models.linear import Role
from unmask.proof.sketched_replay import ForwardPass, SketchedClient

_PADDING_ROWS, _PADDING = 24, 0.15  # rows, or a share of them, that cost less than another pass through the model


@dataclass(frozen=True)
class LastBlockRows:
    """For every prefix: the input of a layer of the last block, its output, and the stream that it leads to.

    `leave(rows, added)` is the stream that leaves the block at some rows, as a function of what is added there.
    """

    nodes: list[Node]
    hidden: Float[Tensor, "n f"]
    added: Float[Tensor, "n d"]
    leave: Callable[[Any, Tensor], Tensor]

    def __getitem__(self, chosen: list[int]) -> LastBlockRows:
        own = torch.tensor(chosen, dtype=torch.long, device=self.hidden.device)

        def leave(rows: Any, added: Tensor) -> Tensor:
            return self.leave(own[rows], added)

        return LastBlockRows([self.nodes[u] for u in chosen], self.hidden[own], self.added[own], leave)


@torch.no_grad()
def last_block_rows(
    model: Model,
    forest: Forest,
    memory_budget_bytes: int,
    role: Role = Role.MLP_OUT,
    client: SketchedClient | None = None,
) -> LastBlockRows:
    """Send every leaf through the model and keep each prefix's rows once, at the down or the output projection.

    `client`: one that has sent them already, up to the last block.
    """
    return KnownRows(model, role, memory_budget_bytes, () if client is None else client.passes).at(forest)


class KnownRows:
    """Rows of the last block for forests that change: a prefix that was sent through the model is not sent again."""

    def __init__(self, model: Model, role: Role, memory_budget_bytes: int, passes: Sequence[ForwardPass] = ()) -> None:
        self.model, self.role, self.memory_budget_bytes = model, role, memory_budget_bytes
        self.passes = passes  # over all leaves, where they were run
        self.place: dict[Node, int] = {}
        self.parts: tuple[Tensor, Tensor, Tensor] | None = None  # inputs of the layer, the stream, what is added to it

    @torch.no_grad()
    def at(self, forest: Forest) -> LastBlockRows:
        """The rows of a forest's prefixes."""
        nodes = _prefixes_of(forest.leaves)
        if any(node not in self.place for node in nodes):
            self._send([leaf for leaf in forest.leaves if not self._knows(leaf)])
        assert self.parts is not None  # a forest has leaves
        own = torch.tensor([self.place[node] for node in nodes], device=self.parts[0].device)
        return self._rows(nodes, *(part[own] for part in self.parts))

    def _knows(self, leaf: Node) -> bool:
        start, tokens = leaf
        return all((start, tokens[:length]) in self.place for length in range(1, len(tokens) + 1))

    def _send(self, leaves: list[Node]) -> None:
        read = _last_attention if self.role is Role.ATTENTION_OUT else _last_block
        last = self.model.num_blocks - 1

        def forward(model: Model, tokens: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            return read(model, model.hidden_states(tokens, mask, last, positions)[-1], mask, positions)

        if self.passes:
            chunks = [[(0, text) for text in part.texts] for part in self.passes]
            outputs = (
                read(self.model, part.last_stream, *_batch(self.model, chunk)[1:])
                for part, chunk in zip(self.passes, chunks, strict=True)
            )
            nodes, parts = _each_prefix_once(self.model, chunks, outputs)
        else:
            nodes, parts = gather_rows(self.model, leaves, self.memory_budget_bytes, forward)
        new = [row for row, node in enumerate(nodes) if node not in self.place]
        hidden, stream, added = (part[new] for part in parts)
        self.place |= {nodes[row]: len(self.place) + place for place, row in enumerate(new)}
        if self.parts is None:
            self.parts = hidden, stream, added
        else:
            old = self.parts
            self.parts = (torch.cat([old[0], hidden]), torch.cat([old[1], stream]), torch.cat([old[2], added]))

    def _rows(self, nodes: list[Node], hidden: Tensor, stream: Tensor, added: Tensor) -> LastBlockRows:
        model, last = self.model, self.model.num_blocks - 1

        def leave_attention(rows: Any, added: Tensor) -> Tensor:
            return model.after_mlp(last, Attended(stream[rows], added))

        def leave_block(rows: Any, added_by_mlp: Tensor) -> Tensor:
            return model.leave_block(last, Attended(stream, added)[rows], added_by_mlp)

        if self.role is Role.ATTENTION_OUT:
            return LastBlockRows(nodes, hidden, added, leave_attention)
        return LastBlockRows(nodes, hidden, model.mlp_output(last, hidden), leave_block)


def _prefixes_of(leaves: Sequence[Node]) -> list[Node]:
    """Every prefix of some texts once, shorter texts first."""
    texts = sorted(leaves, key=lambda text: len(text[1]))
    return list(dict.fromkeys((start, text[:length]) for start, text in texts for length in range(1, len(text) + 1)))


def _last_attention(model: Model, stream: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """At the output projection: behind it no token is mixed with another one either."""
    last = model.num_blocks - 1
    mixed = model.mixed_values(last, stream, positions, mask)
    return mixed, stream, model.after_attention(last, stream, mixed).added


@torch.no_grad()
def site_rows(
    model: Model, texts: Sequence[Node], rows_of: RowsOf, memory_budget_bytes: int
) -> tuple[list[Node], Float[Tensor, "n f"]]:
    """The row of every prefix of texts, at a layer that follows from block 0's attention."""

    def forward(model: Model, tokens: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor]:
        states = model.embed(tokens, positions)
        return (rows_of(model, states, model.mixed_values(0, states, positions, mask)),)

    nodes, (rows,) = gather_rows(model, texts, memory_budget_bytes, forward)
    return nodes, rows


def gather_rows(
    model: Model, texts: Sequence[Node], memory_budget_bytes: int, forward: Callable[..., tuple[Tensor, ...]]
) -> tuple[list[Node], list[Tensor]]:
    """What a forward pass over texts gives at every prefix of them, each prefix once."""
    chunks = _chunks(model, sorted(texts, key=lambda text: len(text[1])), memory_budget_bytes)
    return _each_prefix_once(model, chunks, (forward(model, *_batch(model, leaves)) for leaves in chunks))


def _each_prefix_once(
    model: Model, chunks: Sequence[list[Node]], made: Iterable[tuple[Tensor, ...]]
) -> tuple[list[Node], list[Tensor]]:
    """Rows of chunks of texts, where each prefix stands first."""
    nodes: list[Node] = []
    seen: set[Node] = set()
    kept: list[list[Tensor]] = []
    for leaves, outputs in zip(chunks, made, strict=True):
        where = []
        for index, (start, tokens) in enumerate(leaves):
            for length in range(1, len(tokens) + 1):
                node = start, tokens[:length]
                if node not in seen:
                    seen.add(node)
                    nodes.append(node)
                    where.append((index, length - 1))
        text, position = torch.tensor(where, device=model.device).reshape(-1, 2).T
        kept.append([output[text, position] for output in outputs])
    return nodes, [torch.cat(parts) for parts in zip(*kept, strict=True)]


def _batch(model: Model, leaves: list[Node]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and positions of leaves, padded on the right."""
    length = max(len(tokens) for _, tokens in leaves)
    tokens = torch.zeros(len(leaves), length, dtype=torch.long)
    mask = torch.zeros(len(leaves), length, dtype=torch.bool)
    for row, (_, sequence) in enumerate(leaves):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = True
    starts = torch.tensor([start for start, _ in leaves])
    positions = (starts[:, None] + torch.arange(length)).clamp_max(model.max_positions - 1)
    return tokens.to(model.device), mask.to(model.device), positions.to(model.device)


def _last_block(model: Model, stream: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    last = model.num_blocks - 1
    attended = model.after_attention(last, stream, model.mixed_values(last, stream, positions, mask))
    return model.mlp_hidden(last, attended), attended.stream, attended.added


def _chunks(model: Model, leaves: list[Node], memory_budget_bytes: int) -> list[list[Node]]:
    """Leaves of similar length together, as many as fit the budget with all streams kept."""
    chunks: list[list[Node]] = [[]]
    for leaf in leaves:
        length = len(leaf[1])
        floats = length * (model.width * (model.num_blocks + 12) + model.num_heads * length * 3)
        padding, num_rows = sum(length - len(other[1]) for other in chunks[-1]), (len(chunks[-1]) + 1) * length
        is_padded = padding > max(_PADDING_ROWS, _PADDING * num_rows)
        if chunks[-1] and (is_padded or (len(chunks[-1]) + 1) * floats * 4 > memory_budget_bytes):
            chunks.append([])
        chunks[-1].append(leaf)
    return [chunk for chunk in chunks if chunk]
