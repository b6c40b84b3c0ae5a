"""Edits of texts that are to be tested: for each text a row of them, each of up to two slots.

A move empties a token's slot and fills a gap; two tokens change places by two exchanges. So edits of one slot and moves
combine alike, as long as no slot is written twice (combinations.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.edits import EMPTY, TextBatch


@dataclass(frozen=True)
class Edits:
    """Slots and values as in edits.py; a slot of EMPTY is no edit."""

    slots: Int[Tensor, "c k 2"]
    values: Int[Tensor, "c k 2"]
    valid: Bool[Tensor, "c k"]

    @classmethod
    def of_one_slot(cls, slots: Int[Tensor, "c k"], values: Int[Tensor, "c k"], valid: Bool[Tensor, "c k"]) -> Edits:
        """Edits of one slot each."""
        nothing = torch.full_like(slots, EMPTY)
        return cls(torch.stack([slots, nothing], 2), torch.stack([values, nothing], 2), valid)

    def beside(self, *others: Edits) -> Edits:
        """All of them, text by text."""
        every = (self, *others)
        return Edits(*(torch.cat([getattr(each, name) for each in every], 1) for name in _FIELDS))

    def above(self, *others: Edits) -> Edits:
        """Those of other texts behind these; rows must have one length."""
        every = (self, *others)
        return Edits(*(torch.cat([getattr(each, name) for each in every]) for name in _FIELDS))


_FIELDS = ("slots", "values", "valid")


def deletions(texts: TextBatch) -> Edits:
    """Every token taken out, of texts of more than one."""
    slots = (2 * torch.arange(texts.tokens.shape[1], device=texts.tokens.device) + 1).expand_as(texts.tokens)
    return Edits.of_one_slot(slots, torch.full_like(slots, EMPTY), texts.mask & (texts.lengths > 1)[:, None])


def moves(texts: TextBatch, chosen: Bool[Tensor, " c"], farthest: int) -> Edits:
    """One token of the chosen texts to another gap, or two of them exchanged, up to `farthest` places apart."""
    num, length = texts.tokens.shape
    device, lengths = texts.tokens.device, texts.lengths[:, None]
    place, gap = (x.flatten() for x in torch.meshgrid(*_places(length, length + 1, device), indexing="ij"))
    apart = torch.where(gap > place, gap - place - 1, place - gap)
    is_move = (place < lengths) & (gap <= lengths) & (apart > 0) & (apart <= farthest)
    moved = Edits(
        torch.stack([2 * place + 1, 2 * gap], 1).expand(num, -1, -1),
        torch.stack([torch.full_like(texts.tokens[:, place], EMPTY), texts.tokens[:, place]], 2),
        is_move & chosen[:, None],
    )
    first, second = (x.flatten() for x in torch.meshgrid(*_places(length, length, device), indexing="ij"))
    later = (second - first > 1) & (second - first <= farthest)  # neighbours change places by a move
    first, second = first[later], second[later]
    one, other = texts.tokens[:, first], texts.tokens[:, second]
    exchanged = Edits(
        torch.stack([2 * first + 1, 2 * second + 1], 1).expand(num, -1, -1),
        torch.stack([other, one], 2),
        (second < lengths) & (one != other) & chosen[:, None],
    )
    return moved.beside(exchanged)


def _places(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(rows, device=device), torch.arange(columns, device=device)
