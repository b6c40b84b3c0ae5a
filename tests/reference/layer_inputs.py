"""What enters a linear layer, seen by a hook in transformers' own forward pass: slow, obvious, no cache, no adapter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from unmask.models import Model


@torch.no_grad()
def layer_inputs(model: Model, tokens: Tensor, parameter: str) -> Tensor:
    """Rows (batch, length, d_in) that enter the layer whose weight is `parameter`."""
    seen: list[Tensor] = []
    layer = model.body.get_submodule(parameter.removesuffix(".weight"))
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    try:
        model.body(input_ids=tokens)
    finally:
        handle.remove()
    return seen[0]


def exhaustive_prefixes(
    model: Model, rows_in_batch: Tensor, parameter: str, words: Sequence[int], longest: int, tolerance: float
) -> set[tuple[int, ...]]:
    """Every sequence of `words`, up to a length, whose last row and those of all its prefixes lie in the batch's span.

    `rows_in_batch` are the rows themselves, not a gradient: what the span of a gradient should be.
    """
    frame = torch.linalg.qr(rows_in_batch.double().T)[0]
    accepted: set[tuple[int, ...]] = {()}
    for length in range(1, longest + 1):
        sequences = [s for s in itertools.product(words, repeat=length) if s[:-1] in accepted]
        if not sequences:
            break
        last = layer_inputs(model, torch.tensor(sequences), parameter)[:, -1].double()
        distances = (last - last @ frame @ frame.T).norm(dim=1) / last.norm(dim=1)
        accepted |= {s for s, distance in zip(sequences, distances.tolist(), strict=True) if distance < tolerance}
    return accepted - {()}
