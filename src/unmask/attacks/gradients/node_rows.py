"""Rows of recovered prefixes deeper in the model: one forward pass over the texts gives every prefix's row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.prefix_search import Forest
from unmask.models.adapter import Model

Node = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class LastBlockRows:
    """For every prefix: the input of the last block's down projection, and the stream that the block puts out."""

    nodes: list[Node]
    hidden: Float[Tensor, "n f"]
    states: Float[Tensor, "n d"]


def is_repetition(model: Model, node: Node) -> bool:
    """Whether a prefix 't t … t' of a model without absolute positions has the very rows of 't', at every layer."""
    tokens = node[1]
    return not model.learned_positions and len(tokens) > 1 and len(set(tokens)) == 1


@torch.no_grad()
def last_block_rows(model: Model, forest: Forest, memory_budget_bytes: int) -> LastBlockRows:
    """Send every leaf through the model and keep each prefix's rows once."""
    nodes: list[Node] = []
    seen: set[Node] = set()
    kept: list[tuple[Tensor, Tensor]] = []
    for leaves in _chunks(model, sorted(forest.leaves, key=lambda leaf: len(leaf[1])), memory_budget_bytes):
        hidden, states = _forward(model, leaves)
        where = []
        for index, (offset, tokens) in enumerate(leaves):
            for length in range(1, len(tokens) + 1):
                node = offset, tokens[:length]
                if node not in seen:
                    seen.add(node)
                    nodes.append(node)
                    where.append((index, length - 1))
        text, position = torch.tensor(where, device=model.device).reshape(-1, 2).T
        kept.append((hidden[text, position], states[text, position]))
    return LastBlockRows(nodes, torch.cat([hidden for hidden, _ in kept]), torch.cat([states for _, states in kept]))


def _forward(model: Model, leaves: list[Node]) -> tuple[Tensor, Tensor]:
    length = max(len(tokens) for _, tokens in leaves)
    tokens = torch.zeros(len(leaves), length, dtype=torch.long)
    mask = torch.zeros(len(leaves), length, dtype=torch.bool)
    for row, (_, sequence) in enumerate(leaves):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = True
    offsets = torch.tensor([offset for offset, _ in leaves])
    positions = (offsets[:, None] + torch.arange(length)).clamp_max(model.max_positions - 1)
    tokens, mask, positions = (part.to(model.device) for part in (tokens, mask, positions))
    last = model.num_blocks - 1
    stream = model.hidden_states(tokens, mask, num_blocks=last, positions=positions)[-1]
    attended = model.after_attention(last, stream, model.mixed_values(last, stream, positions, mask))
    hidden = model.mlp_hidden(last, attended)
    return hidden, model.after_mlp(last, attended, hidden)


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
