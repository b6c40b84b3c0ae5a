"""Texts whose vectors should be hardest to tell from a text's: the runners-up of a certificate.

Every token exchanged for those whose effects are most like its own, every token taken out, the tokens with the least
effect and the most frequent ones put into every gap, and the text in other orders.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from unmask.attacks.outputs.vectors.candidate_edits import Edits, deletions, moves
from unmask.attacks.outputs.vectors.edits import TextBatch, concatenate
from unmask.attacks.outputs.vectors.insertion_effects import InsertionEffects
from unmask.attacks.outputs.vectors.orders import word_orders

_FARTHEST = 4


def near_texts(text: tuple[int, ...], effects: InsertionEffects, num_tokens: int) -> TextBatch:
    """Neighbours of one text, `num_tokens` tokens at every place; the text itself is not among them."""
    own = TextBatch.of([text], effects.rows.device)
    edits = [_exchanges(own, effects, num_tokens), _insertions(own, effects, num_tokens), deletions(own)]
    edits.append(moves(own, own.lengths > 1, _FARTHEST))
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


def _exchanges(own: TextBatch, effects: InsertionEffects, num_tokens: int) -> Edits:
    tokens = own.tokens[0]
    apart = torch.cdist(effects.rows[tokens], effects.rows)
    apart[torch.arange(len(tokens), device=tokens.device), tokens] = torch.inf
    values = apart.topk(num_tokens, dim=1, largest=False).indices
    slots = (2 * torch.arange(len(tokens), device=tokens.device)[:, None] + 1).expand_as(values)
    slots, values = slots.reshape(1, -1), values.reshape(1, -1)
    return Edits.of_one_slot(slots, values, torch.ones_like(values, dtype=torch.bool))


def _insertions(own: TextBatch, effects: InsertionEffects, num_tokens: int) -> Edits:
    length = own.tokens.shape[1]
    weak = effects.rows.norm(dim=1).topk(num_tokens, largest=False).indices
    likely: Int[Tensor, " k"] = torch.cat([weak, effects.log_prior.topk(num_tokens).indices]).unique()
    gaps = torch.arange(length + 1, device=likely.device)
    slots = (2 * gaps)[:, None].expand(-1, len(likely)).reshape(1, -1)
    values = likely.expand(length + 1, -1).reshape(1, -1)
    return Edits.of_one_slot(slots, values, torch.ones_like(values, dtype=torch.bool))
