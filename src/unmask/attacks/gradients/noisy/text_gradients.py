"""The gradient of single texts at the last block, many at once, by forward passes alone.

    G = Σ_u a_uᵀ·δ_u,   δ_u = J_uᵀ(μ_u − e_y),   u the prefixes of a text and y the token behind each

Notation: as in `endings.py`. Limits: next-token training; the last layer behind which no token is mixed with another.
Cost: a forward pass of the texts, and two products with the output embedding for each of their prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.decoder.labels import LabelReader
from unmask.attacks.gradients.decoder.last_block_rows import last_block_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.linalg.gap import Gap
from unmask.models.adapter import Model
from unmask.models.linear import Role


@torch.no_grad()
def last_block_gradients(
    model: Model, role: Role, texts: Sequence[tuple[int, ...]], memory_budget_bytes: int
) -> Iterator[Float[Tensor, "f d"]]:
    """Of each text the gradient of its mean loss at a layer of the last block, as (d_in, d_out), in float64."""
    assert model.token_head is not None  # the caller has seen that texts predict their tokens
    leaves = [(0, tokens[:-1]) for tokens in dict.fromkeys(texts)]
    rows = last_block_rows(model, Forest({}, leaves, Gap(0.0, 1.0), 0), memory_budget_bytes, role)
    nothing = rows.added.new_zeros(rows.added.shape[1], 0)
    reader = LabelReader(model.token_head, rows, torch.zeros_like(rows.added), nothing, memory_budget_bytes)
    place = {tokens: u for u, (_, tokens) in enumerate(rows.nodes)}
    for tokens in texts:
        inner = torch.tensor([place[tokens[:length]] for length in range(1, len(tokens))], device=model.device)
        arrived = reader.directions(inner, torch.tensor(tokens[1:], device=model.device))
        yield rows.hidden[inner].double().T @ arrived.double() / len(inner)
