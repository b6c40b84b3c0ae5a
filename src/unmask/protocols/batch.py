"""Texts to a padded batch, as a client's data loader does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from unmask.errors import InputError
from unmask.models.adapter import Model
from unmask.shapes import MaskBatch, TokenBatch

Texts = Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Batch:
    """Token ids with the mask of the real ones."""

    tokens: TokenBatch
    mask: MaskBatch

    @property
    def last(self) -> torch.Tensor:
        """Index of each text's last real token."""
        length = self.mask.shape[1]
        return length - 1 - self.mask.flip(1).int().argmax(1)


def make_batch(
    model: Model,
    texts: Texts,
    *,
    padding_side: Literal["left", "right"] = "right",
    max_length: int | None = None,
) -> Batch:
    """Encode and pad texts; token ids are taken as they are."""
    if padding_side not in ("left", "right"):
        raise InputError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
    if isinstance(texts, str):
        raise InputError("texts must be a list of texts, got one string; put it into a list")
    if max_length is not None and max_length < 1:
        raise InputError(f"max_length must be at least 1, got {max_length}")
    limit = min(max_length or model.max_positions, model.max_positions)
    sequences = [_tokens_of(model, text)[:limit] for text in texts]
    if not sequences:
        raise InputError("the batch is empty: give at least one text")
    for index, sequence in enumerate(sequences):
        if not sequence:
            raise InputError(f"text {index} has no tokens; leave empty texts out")
    length = max(map(len, sequences))
    tokens = torch.full((len(sequences), length), model.pad_token)
    mask = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        where = slice(0, len(sequence)) if padding_side == "right" else slice(length - len(sequence), length)
        tokens[row, where] = torch.tensor(sequence)
        mask[row, where] = True
    return Batch(tokens.to(model.device), mask.to(model.device))


def _tokens_of(model: Model, text: str | Sequence[int]) -> list[int]:
    if isinstance(text, str):
        return model.encode(text)
    tokens = [int(token) for token in text]
    if tokens and not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise InputError(f"token ids must lie in 0…{model.vocab_size - 1}, got {min(tokens)}…{max(tokens)}")
    return tokens
