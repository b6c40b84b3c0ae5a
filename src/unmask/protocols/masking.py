"""Masked-token training, BERT's own: hide some tokens and predict them.

Of the tokens drawn, 80 % become [MASK], 10 % a random token of the vocabulary, 10 % stay; the loss is the mean
cross-entropy at the positions that were drawn. Special tokens and padding are never drawn.

Source: Devlin et al., BERT, 1810.04805, section 3.1; transformers' DataCollatorForLanguageModeling.
Deviation: a batch of which nothing was drawn has no loss, so its most nearly drawn token is taken.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from unmask.errors import InputError
from unmask.models.adapter import Model
from unmask.protocols.batch import Batch
from unmask.protocols.client import precise
from unmask.shapes import TokenBatch

_UNPREDICTED = -100  # the label that torch's cross-entropy leaves out
_MASKED, _REPLACED = 0.8, 0.9  # below the first: [MASK]; between them: a random token; above: left as it is


def mask_tokens(model: Model, batch: Batch, share: float, generator: torch.Generator) -> tuple[Batch, TokenBatch]:
    """The batch with tokens hidden, and the labels: what stood at the positions drawn, −100 elsewhere."""
    if not 0 < share <= 1:
        raise InputError(f"mask_share must lie above 0 and be at most 1, got {share}")
    if model.mask_token is None:
        raise InputError("masked-token training needs a tokenizer with a mask token, and this model has none")
    special = torch.tensor(sorted(model.special_tokens), device=batch.tokens.device)
    eligible = batch.mask & ~torch.isin(batch.tokens, special)
    if not bool(eligible.any()):
        raise InputError("masked-token training needs a token to hide, and these texts hold special tokens only")
    draws, fates = (torch.rand(batch.tokens.shape, generator=generator).to(batch.tokens.device) for _ in range(2))
    strangers = torch.randint(model.vocab_size, batch.tokens.shape, generator=generator).to(batch.tokens.device)
    draws = draws.masked_fill(~eligible, 2.0)
    drawn = (draws < share) | (draws == draws.min())
    tokens = batch.tokens.masked_fill(drawn & (fates < _MASKED), model.mask_token)
    tokens = torch.where(drawn & (fates >= _MASKED) & (fates < _REPLACED), strangers, tokens)
    return replace(batch, tokens=tokens), batch.tokens.masked_fill(~drawn, _UNPREDICTED)


def masked_token_loss(model: Model, batch: Batch, labels: TokenBatch) -> Tensor:
    """Mean cross-entropy of the labels that are not −100, as transformers computes it from them."""
    if model.causal or model.token_head is None:
        raise InputError(f"masked-token training needs an encoder, and this {model.family} model is not one")
    states = model.body(**batch.inputs).last_hidden_state
    predicted = labels != _UNPREDICTED
    return functional.cross_entropy(precise(model.token_head.logits(states[predicted])), labels[predicted])
