"""Texts whose vectors should be hardest to tell from a text's: the runners-up of a certificate.

Every token exchanged for those whose rows are most like its own, every token taken out, the tokens with the least
effect and the most frequent ones put into every gap, and the text in other orders.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.candidate_edits import Edits, deletions, moves
from unmask.attacks.outputs.vectors.edits import TextBatch, concatenate
from unmask.attacks.outputs.vectors.orders import word_orders

_FARTHEST = 4


class TokenLikeness(Protocol):
    """A row for every token, near those of tokens like it, and how frequent tokens are."""

    @property
    def rows(self) -> Float[Tensor, "vocab k"]: ...

    @property
    def log_prior(self) -> Float[Tensor, " vocab"]: ...


def near_texts(text: tuple[int, ...], likeness: TokenLikeness, num_tokens: int) -> TextBatch:
    """Neighbours of one text, `num_tokens` tokens at every place; the text itself is not among them."""
    own = TextBatch.of([text], likeness.rows.device)
    edits = [_insertions(own, likeness, num_tokens), deletions(own), moves(own, own.lengths > 1, _FARTHEST)]
    if text:
        edits.append(_exchanges(own, likeness, num_tokens))
    found = []
    for each in edits:
        columns = each.valid[0].nonzero()[:, 0]
        if len(columns):
            slots, values = each.slots[0, columns], each.values[0, columns]
            found.append(own.edit(torch.zeros_like(columns), slots, values))
    if len(text) > 2:
        orders = word_orders(len(text), 2, _FARTHEST, exchanged=0).to(own.tokens.device)
        found.append(TextBatch(own.tokens[0][orders]))
    texts = concatenate(found)
    padded = torch.nn.functional.pad(own.tokens, (0, texts.tokens.shape[1] - own.tokens.shape[1]), value=-1)
    return texts[(texts.tokens != padded).any(1)]


def _exchanges(own: TextBatch, likeness: TokenLikeness, num_tokens: int) -> Edits:
    tokens = own.tokens[0]
    apart = torch.cdist(likeness.rows[tokens], likeness.rows)
    apart[torch.arange(len(tokens), device=tokens.device), tokens] = torch.inf
    values = apart.topk(min(num_tokens, apart.shape[1]), dim=1, largest=False).indices
    slots = (2 * torch.arange(len(tokens), device=tokens.device)[:, None] + 1).expand_as(values)
    slots, values = slots.reshape(1, -1), values.reshape(1, -1)
    return Edits.of_one_slot(slots, values, torch.ones_like(values, dtype=torch.bool))


def _insertions(own: TextBatch, likeness: TokenLikeness, num_tokens: int) -> Edits:
    length = own.tokens.shape[1]
    num_tokens = min(num_tokens, len(likeness.rows))
    weak = likeness.rows.norm(dim=1).topk(num_tokens, largest=False).indices
    likely: Int[Tensor, " k"] = torch.cat([weak, likeness.log_prior.topk(num_tokens).indices]).unique()
    gaps = torch.arange(length + 1, device=likely.device)
    slots = (2 * gaps)[:, None].expand(-1, len(likely)).reshape(1, -1)
    values = likely.expand(length + 1, -1).reshape(1, -1)
    return Edits.of_one_slot(slots, values, torch.ones_like(values, dtype=torch.bool))
