"""Rows of recovered prefixes deeper in the model: one forward pass over the texts gives every prefix's row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.decoder.prefix_search import Forest, Node
from unmask.attacks.gradients.sites import RowsOf
from unmask.models.adapter import Attended, Model
from unmask.models.linear import Role


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
def last_block_rows(model: Model, forest: Forest, memory_budget_bytes: int, role: Role = Role.MLP_OUT) -> LastBlockRows:
    """Send every leaf through the model and keep each prefix's rows once, at the down or the output projection."""
    if role is Role.ATTENTION_OUT:
        return _attention_rows(model, forest, memory_budget_bytes)
    nodes, (hidden, stream, added) = gather_rows(model, forest.leaves, memory_budget_bytes, _last_block)
    last, attended = model.num_blocks - 1, Attended(stream, added)

    def leave(rows: Any, added: Tensor) -> Tensor:
        return model.leave_block(last, attended[rows], added)

    return LastBlockRows(nodes, hidden, model.mlp_output(last, hidden), leave)


def _attention_rows(model: Model, forest: Forest, memory_budget_bytes: int) -> LastBlockRows:
    """The same at the output projection: behind it no token is mixed with another one either."""
    last = model.num_blocks - 1

    def forward(model: Model, tokens: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stream = model.hidden_states(tokens, mask, num_blocks=last, positions=positions)[-1]
        mixed = model.mixed_values(last, stream, positions, mask)
        return mixed, stream, model.after_attention(last, stream, mixed).added

    nodes, (mixed, stream, added) = gather_rows(model, forest.leaves, memory_budget_bytes, forward)

    def leave(rows: Any, added: Tensor) -> Tensor:
        return model.after_mlp(last, Attended(stream[rows], added))

    return LastBlockRows(nodes, mixed, added, leave)


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
    nodes: list[Node] = []
    seen: set[Node] = set()
    kept: list[list[Tensor]] = []
    for leaves in _chunks(model, sorted(texts, key=lambda text: len(text[1])), memory_budget_bytes):
        outputs = forward(model, *_batch(model, leaves))
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


def _last_block(model: Model, tokens: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    last = model.num_blocks - 1
    stream = model.hidden_states(tokens, mask, num_blocks=last, positions=positions)[-1]
    attended = model.after_attention(last, stream, model.mixed_values(last, stream, positions, mask))
    return model.mlp_hidden(last, attended), attended.stream, attended.added


def _chunks(model: Model, leaves: list[Node], memory_budget_bytes: int) -> list[list[Node]]:
    """Leaves of similar length together, as many as fit the budget with all streams kept."""
    chunks: list[list[Node]] = [[]]
    for leaf in leaves:
        length = len(leaf[1])
        floats = length * (model.width * (model.num_blocks + 12) + model.num_heads * length * 3)
        if chunks[-1] and (len(chunks[-1]) + 1) * floats * 4 > memory_budget_bytes:
            chunks.append([])
        chunks[-1].append(leaf)
    return [chunk for chunk in chunks if chunk]
