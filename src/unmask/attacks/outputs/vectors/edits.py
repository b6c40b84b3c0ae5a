"""Edits of token sequences, many at once: exchange, put in, take out, move.

A text of n tokens has 2n + 1 slots: gap 0, token 0, gap 1, token 1, …, gap n. An edit writes a value into a slot: a
token into a token's slot exchanges it, into a gap puts it in, and EMPTY into a token's slot takes it out. Edits of
different slots may be made together, and whatever is EMPTY afterwards is squeezed out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

EMPTY = -1


@dataclass(frozen=True)
class TextBatch:
    """Token sequences, EMPTY behind their ends."""

    tokens: Int[Tensor, "k length"]

    @property
    def lengths(self) -> Int[Tensor, " k"]:
        """Tokens of each text."""
        return (self.tokens >= 0).sum(1)

    @property
    def mask(self) -> Bool[Tensor, "k length"]:
        """Where tokens are."""
        return self.tokens >= 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Tensor | slice) -> TextBatch:
        return TextBatch(self.tokens[index])

    def edit(self, rows: Int[Tensor, " m"], slots: Int[Tensor, "m edits"], values: Int[Tensor, "m edits"]) -> TextBatch:
        """Copies of some texts, each with its own edits; a slot of EMPTY is no edit."""
        length = self.tokens.shape[1]
        filled = self.tokens.new_full((len(rows), 2 * length + 2), EMPTY)  # the last column takes what is no edit
        filled[:, 1:-1:2] = self.tokens[rows]
        where = torch.where(slots < 0, 2 * length + 1, slots)
        filled.scatter_(1, where, values)
        return squeeze(filled[:, :-1])

    def as_tuples(self) -> list[tuple[int, ...]]:
        """The texts as Python tuples."""
        return [tuple(token for token in row if token >= 0) for row in self.tokens.tolist()]

    @classmethod
    def of(cls, texts: list[tuple[int, ...]], device: torch.device | str = "cpu", length: int = 0) -> TextBatch:
        """Texts of any lengths."""
        length = max([length, 1, *map(len, texts)])
        rows = [[*text, *[EMPTY] * (length - len(text))] for text in texts]
        return cls(torch.tensor(rows, dtype=torch.long, device=device).view(len(texts), length))


def squeeze(filled: Int[Tensor, "k slots"]) -> TextBatch:
    """Move what is EMPTY behind the ends."""
    order = (filled < 0).to(torch.uint8).argsort(dim=1, stable=True)
    tokens = filled.gather(1, order)
    longest = int((filled >= 0).sum(1).max()) if len(filled) else 0
    return TextBatch(tokens[:, : max(1, longest)])


def concatenate(batches: list[TextBatch]) -> TextBatch:
    """Batches of different lengths behind each other."""
    length = max(batch.tokens.shape[1] for batch in batches)
    pad = torch.nn.functional.pad
    return TextBatch(torch.cat([pad(b.tokens, (0, length - b.tokens.shape[1]), value=EMPTY) for b in batches]))


def first_of_each(hashes: Int[Tensor, " k"]) -> tuple[Int[Tensor, " different"], Int[Tensor, " different"]]:
    """The different numbers, and where each comes first."""
    values, inverse = torch.unique(hashes, return_inverse=True)
    order = torch.arange(len(hashes), device=hashes.device).flip(0)
    return values, torch.empty_like(values).scatter_(0, inverse.flip(0), order)


class TextHash:
    """A 64-bit number for each text; equal texts have equal ones, and others by a chance of 2⁻⁶⁴."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        low, high = -(2**63), 2**63 - 1
        self.words = torch.randint(low, high, (vocab_size + 1,), generator=generator).to(device)
        self.places = (torch.randint(low, high, (1024,), generator=generator) | 1).to(device)

    def __call__(self, texts: TextBatch) -> Int[Tensor, " k"]:
        """One number a text."""
        tokens = texts.tokens
        terms = self.words[tokens] * self.places[: tokens.shape[1]]
        return terms.masked_fill(tokens < 0, 0).sum(1)
