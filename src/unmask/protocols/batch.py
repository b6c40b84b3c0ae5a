"""Texts to a padded batch, as a client's data loader does it.

Texts that are too long are cut as `truncation=True` of transformers cuts them: special tokens stay, and of a pair the
longer part is cut first.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from unmask.arguments import require_count
from unmask.errors import InputError, TooLargeError
from unmask.models.adapter import Model
from unmask.models.mapped import free_bytes
from unmask.shapes import MaskBatch, TokenBatch
from unmask.wording import count_noun

TokenIds = Sequence[int]
# A pair of texts, or of their tokens: the first part ends with [SEP], and the second one too.
Pair = tuple[str, str] | tuple[TokenIds, TokenIds]
Texts = Sequence[str | TokenIds | Pair]


class TruncationWarning(UserWarning):
    """Texts were cut, so that what a client trains on is not all of what it was given."""


@dataclass(frozen=True)
class Batch:
    """Token ids with the mask of the real ones; `types` (0 or 1) where some text is a pair."""

    tokens: TokenBatch
    mask: MaskBatch
    types: TokenBatch | None = None

    @property
    def last(self) -> torch.Tensor:
        """Index of each text's last real token."""
        length = self.mask.shape[1]
        return length - 1 - self.mask.flip(1).int().argmax(1)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What transformers' forward takes."""
        inputs = {"input_ids": self.tokens, "attention_mask": self.mask.long()}
        return inputs if self.types is None else {**inputs, "token_type_ids": self.types}

    def part(self, start: int, stop: int) -> Batch:
        """Some of the texts, padded as they are."""
        types = None if self.types is None else self.types[start:stop]
        return Batch(self.tokens[start:stop], self.mask[start:stop], types)


def require_texts(texts: object) -> None:
    """A list of texts; one string would be read letter by letter."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        seen = "one string; put it into a list" if isinstance(texts, str) else f"{type(texts).__name__}"
        raise InputError(f"texts must be a list of texts, got {seen}")


def least_bytes(model: Model, num_texts: int, length: int, *, backward: bool) -> int:
    """What a pass certainly holds at one time: attention of every pair of tokens, of each block if gradients follow.

    With gradients also logits, their logarithms and the gradient of both, where the model predicts tokens.
    """
    size = torch.finfo(model.dtype).bits // 8
    heads = getattr(model.config, "num_attention_heads", 1)
    attention = num_texts * heads * length**2 * size * (model.num_blocks if backward else 2)
    predicts = backward and model.unembedding is not None
    return attention + (3 * num_texts * length * model.vocab_size * size if predicts else 0)


def require_memory(model: Model, num_texts: int, length: int, *, backward: bool) -> None:
    """Refuse texts that certainly do not fit into the memory that is free: the system would end the process."""
    if model.device.type != "cpu":
        return
    needed, free = least_bytes(model, num_texts, length, backward=backward), free_bytes()
    if needed <= free:
        return
    fits = length
    while fits > 1 and least_bytes(model, num_texts, fits, backward=backward) > free / 2:
        fits = fits * 3 // 4
    raise TooLargeError(
        f"max_length must be lower here: {count_noun(num_texts, 'text')} of {length:,} tokens take {needed / 1e9:,.1f} "
        f"GB of memory at least, and {free / 1e9:,.1f} GB are free; try max_length={fits}, or fewer texts at a time",
        needed,
        free,
    )


def make_batch(
    model: Model,
    texts: Texts,
    *,
    padding_side: Literal["left", "right"] = "right",
    max_length: int | None = None,
) -> Batch:
    """Encode and pad texts and pairs of texts; token ids are taken as they are. Warns if texts had to be cut."""
    if padding_side not in ("left", "right"):
        raise InputError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
    require_texts(texts)
    require_count("max_length", max_length)
    limit = min(max_length or model.max_positions, model.max_positions)
    encoded = [_tokens_and_types(model, text, limit) for text in texts]
    if num_cut := sum(was_cut for _, _, was_cut in encoded):
        cause = "as asked" if limit == max_length else f"the longest that this {model.family} model takes"
        warnings.warn(
            f"cut {num_cut} of {count_noun(len(encoded), 'text')} to {count_noun(limit, 'token')}, {cause}",
            TruncationWarning,
            stacklevel=2,
        )
    sequences = [(tokens, types) for tokens, types, _ in encoded]
    if not sequences:
        raise InputError("the batch is empty: give at least one text")
    for index, (sequence, _) in enumerate(sequences):
        if not sequence:
            raise InputError(f"text {index} has no tokens; leave empty texts out")
    length = max(len(sequence) for sequence, _ in sequences)
    tokens = torch.full((len(sequences), length), model.pad_token)
    types = torch.zeros(len(sequences), length, dtype=torch.long)
    mask = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, (sequence, kinds) in enumerate(sequences):
        where = slice(0, len(sequence)) if padding_side == "right" else slice(length - len(sequence), length)
        tokens[row, where] = torch.tensor(sequence)
        types[row, where] = torch.tensor(kinds)
        mask[row, where] = True
    holds_pairs = any(map(is_pair, texts))
    return Batch(tokens.to(model.device), mask.to(model.device), types.to(model.device) if holds_pairs else None)


def is_pair(text: str | TokenIds | Pair) -> bool:
    """Whether a text is a pair: a tuple of two strings, or of two lists of tokens."""
    if not isinstance(text, tuple) or len(text) != 2:
        return False
    return all(isinstance(part, Sequence) or getattr(part, "ndim", 0) == 1 for part in text)


def _tokens_and_types(model: Model, text: Any, limit: int) -> tuple[list[int], list[int], bool]:
    """Tokens and types of a text or a pair, and whether it had to be cut."""
    if not is_pair(text):
        tokens = model.encode(text) if isinstance(text, str) else _check(model, text)
        if len(tokens) <= limit:
            return tokens, [0] * len(tokens), False
        tokens = model.encode(text, limit) if isinstance(text, str) else _cut(model, tokens, limit)
        return tokens, [0] * len(tokens), True
    if model.num_token_types < 2:
        raise InputError(f"this {model.family} model has no token types, so it takes no pairs; give single texts")
    if any(isinstance(part, str) for part in text):
        tokens, types = model.encode_pair(text[0], text[1])
        was_cut = len(tokens) > limit
        return *(model.encode_pair(text[0], text[1], limit) if was_cut else (tokens, types)), was_cut
    first, second = (_check(model, part) for part in text)
    was_cut = len(first) + len(second) > limit
    if was_cut:
        lengths = _longest_first(len(first), len(second), limit)
        first, second = (_cut(model, part, length) for part, length in zip((first, second), lengths, strict=True))
    return [*first, *second], [0] * len(first) + [1] * len(second), was_cut


def _cut(model: Model, tokens: list[int], length: int) -> list[int]:
    """The first tokens; the one that closes every text stays, where the tokenizer has such a one."""
    frame = model.frame_tokens
    if frame is None or tokens[-1:] != [frame[1]] or length >= len(tokens) or length < 1:
        return tokens[:length]
    return [*tokens[: length - 1], frame[1]]


def _longest_first(first: int, second: int, limit: int) -> tuple[int, int]:
    """Lengths of two parts once the longer one was cut to the other, and then both alike; as fast tokenizers do it."""
    short = min(first, second)
    if 2 * short > limit:
        short = limit // 2
    return (short, limit - short) if first <= second else (limit - short, short)


def _check(model: Model, text: TokenIds) -> list[int]:
    if not isinstance(text, Iterable) or any(isinstance(token, str) for token in text):
        seen = "a list holds strings" if isinstance(text, Iterable) else f"one is a {type(text).__name__}"
        raise InputError(f"a text must be a string, a tuple of two strings or token ids; {seen}")
    tokens = [operator.index(token) for token in text] if all(map(is_whole, text)) else None
    if tokens is None:
        raise InputError("token ids must be whole numbers; encode texts with the tokenizer first")
    if tokens and not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise InputError(f"token ids must lie in 0…{model.vocab_size - 1}, got {min(tokens)}…{max(tokens)}")
    return tokens


def is_whole(token: Any) -> bool:
    """Whether a token or a label is a whole number, of Python, numpy or torch."""
    return hasattr(token, "__index__") and not isinstance(token, bool)
