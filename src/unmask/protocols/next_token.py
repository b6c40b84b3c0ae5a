"""A service shows what it thinks of the next token: a full row of logits, or of log-probabilities, behind a prompt."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence.next_token import vectors_of_logits
from unmask.evidence.vectors import VectorEvidence
from unmask.models.adapter import Model
from unmask.models.load import require_model
from unmask.protocols.batch import Texts, make_batch, require_texts

_TEXTS_AT_ONCE = 16


@torch.no_grad()
def observe_next_token(
    model: Model, texts: Texts, *, prefix: str = "", log_probabilities: bool = False
) -> VectorEvidence:
    """What full rows of the next token's logits tell of the last states of prompts; `prefix` stands in front."""
    require_model(model)
    require_texts(texts)
    if not texts:
        raise InputError("the batch is empty: give at least one text")
    whole = [prefix + text if isinstance(text, str) else text for text in texts]
    rows = next_token_logits(model, whole)
    return vectors_of_logits(model, rows.log_softmax(1) if log_probabilities else rows, prefix=prefix)


@torch.no_grad()
def next_token_logits(model: Model, texts: Texts) -> Float[Tensor, "texts vocab"]:
    """Rows of logits behind whole texts, as the model itself gives them."""
    parts = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        batch = make_batch(model, texts[start : start + _TEXTS_AT_ONCE])
        logits = model.hf(input_ids=batch.tokens, attention_mask=batch.mask.long()).logits
        last = batch.mask.shape[1] - 1 - batch.mask.flip(1).int().argmax(1)
        parts.append(logits[torch.arange(len(logits), device=last.device), last])
    return torch.cat(parts)
