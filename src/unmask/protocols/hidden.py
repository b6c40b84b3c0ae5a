"""A service hands out hidden states instead of text: split inference, embeddings APIs, activation logs."""

from __future__ import annotations

from typing import Literal

import torch

from unmask.errors import InputError
from unmask.evidence.outputs import HiddenEvidence
from unmask.models.adapter import Model
from unmask.protocols.batch import Texts, make_batch


@torch.no_grad()
def observe_hidden(
    model: Model, texts: Texts, *, layer: int, padding_side: Literal["left", "right"] = "right"
) -> HiddenEvidence:
    """The residual stream after `layer` blocks (0: embeddings), before the final norm; padding is zeroed."""
    if not 0 <= layer <= model.num_blocks:
        raise InputError(f"layer must lie in 0…{model.num_blocks}, got {layer}")
    batch = make_batch(model, texts, padding_side=padding_side)
    states = model.hidden_states(batch.tokens, batch.mask, num_blocks=layer, types=batch.types)[layer]
    return HiddenEvidence(states * batch.mask[..., None], batch.mask, layer, model.fingerprint())
