"""Adapters beside transformers' own forward pass: batches, states, and the largest error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.models import Model

# The same products of float64 numbers, summed in another order: 1e-16 each, over at most 30 blocks and widths of 768.
FLOAT64_PARITY = 1e-10
# The same in float32: 6e-8 each, and a post-norm or a peaked softmax amplifies it ten- to a hundredfold.
FLOAT32_PARITY = 1e-5


def random_batch(model: Model, padding_side: str, lengths: tuple[int, ...] = (9, 14, 1)) -> tuple[Tensor, Tensor]:
    """Random tokens with the mask of the real ones; padding holds random tokens too, which must not matter."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(model.vocab_size, (len(lengths), max(lengths)), generator=generator)
    steps = torch.arange(max(lengths)).expand_as(tokens)
    counts = torch.tensor(lengths)[:, None]
    mask = steps < counts if padding_side == "right" else steps >= max(lengths) - counts
    return tokens, mask


@torch.no_grad()
def states_of_transformers(model: Model, tokens: Tensor, mask: Tensor, **inputs: Any) -> tuple[list[Tensor], Tensor]:
    """The stream before every block, and what the head sees."""
    output = model.body(
        input_ids=tokens, attention_mask=mask.long(), output_hidden_states=True, use_cache=False, **inputs
    )
    return list(output.hidden_states), output.last_hidden_state


@torch.no_grad()
def worst_error(model: Model, tokens: Tensor, mask: Tensor, positions: Tensor | None = None) -> float:
    """The largest relative error of any real token's row at any layer, the final norm included."""
    inputs = {} if positions is None else {"position_ids": positions}
    theirs, their_last = states_of_transformers(model, tokens, mask, **inputs)
    ours = model.hidden_states(tokens, mask, positions=positions)
    assert len(ours) == len(theirs) == model.num_blocks + 1
    # transformers' last entry has the final norm already; the stream before it is not handed out.
    pairs = [*zip(ours[:-1], theirs[:-1], strict=True), (model.final_norm(ours[-1]), their_last)]
    return max(float(((a - b)[mask].norm(dim=-1) / b[mask].norm(dim=-1)).max()) for a, b in pairs)


def precise(model: Model) -> Model:
    """A float64 copy with scaled-dot-product attention; transformers' eager one takes its softmax in float32."""
    twin = model.to(dtype=torch.float64)
    twin.hf.set_attn_implementation("sdpa")
    return twin
