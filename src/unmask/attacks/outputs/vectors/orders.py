"""Other orders of a text's words: pieces of several words moved or exchanged, words never torn apart.

One table for each number of words; where there are many orders, some are drawn.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.edits import EMPTY, TextBatch, squeeze
from unmask.models.adapter import Model

_LONGEST = 8  # words of a piece that is moved
_EXCHANGED = 3  # words of pieces that are exchanged


def continuing_tokens(model: Model) -> Bool[Tensor, " vocab"]:
    """Which tokens continue the word before them, as their spelling shows; none without a tokenizer."""
    if model.tokenizer is None:
        return torch.zeros(model.vocab_size, dtype=torch.bool, device=model.device)
    names = [name or "" for name in model.tokenizer.convert_ids_to_tokens(list(range(model.vocab_size)))]
    marks_words = any(name[:1] in ("▁", "Ġ") for name in names)
    continues = [name.isalpha() and name[:1] not in ("▁", "Ġ") if marks_words else name[:2] == "##" for name in names]
    return torch.tensor(continues, device=model.device)


def reorder(
    texts: TextBatch, continues: Bool[Tensor, " vocab"], at_most: int, generator: torch.Generator
) -> tuple[Int[Tensor, " k"], TextBatch]:
    """Texts in other orders, up to `at_most` of each: which text each is of, and the orders."""
    device, words = texts.tokens.device, split_words(texts, continues)
    rows, orders = [], []
    for row, num in enumerate((words[:, :, 0] >= 0).sum(1).tolist()):
        every = word_orders(num)
        if len(every) > at_most:
            every = every[torch.randperm(len(every), generator=generator)[:at_most]]
        orders.append(torch.nn.functional.pad(every, (0, words.shape[1] - num), value=words.shape[1]))
        rows += [row] * len(every)
    found = torch.tensor(rows, dtype=torch.long).to(device)
    none = torch.full_like(words[:, :1], EMPTY)
    table = torch.cat([words, none], 1)  # the last word is none
    return found, squeeze(table[found[:, None], torch.cat(orders).to(device)].flatten(1))


def split_words(texts: TextBatch, continues: Bool[Tensor, " vocab"]) -> Int[Tensor, "k words pieces"]:
    """The tokens of each word of each text, EMPTY behind their ends."""
    tokens, mask = texts.tokens, texts.mask
    begins = ~continues[tokens] & mask
    begins[:, 0] = mask[:, 0]
    word = begins.long().cumsum(1) - 1
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    start = torch.where(begins, place, 0).cummax(1).values
    num_words, num_pieces = (torch.stack([word.max(), (place - start)[mask].max()]) + 1).tolist()
    words = tokens.new_full((len(tokens), num_words, num_pieces), EMPTY)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
    words[rows[mask], word[mask], (place - start)[mask]] = tokens[mask]
    return words


@lru_cache(maxsize=256)
def word_orders(
    num: int, longest: int = _LONGEST, farthest: int = 10**6, exchanged: int = _EXCHANGED
) -> Int[Tensor, "k num"]:
    """Orders with one piece moved up to `farthest` places, or two exchanged; none twice, not the one that is."""
    own = tuple(range(num))
    found = set()
    for size in range(1, min(longest, num // 2) + 1):
        for start in range(num - size + 1):
            rest, piece = own[:start] + own[start + size :], own[start : start + size]
            places = range(max(0, start - farthest), min(len(rest), start + farthest) + 1)
            found |= {rest[:place] + piece + rest[place:] for place in places}
    for first in range(num):
        for one in range(1, exchanged + 1):
            for second in range(first + one + 1, num):
                for other in range(1, min(exchanged, num - second) + 1):
                    middle, end = own[first + one : second], second + other
                    found.add(own[:first] + own[second:end] + middle + own[first : first + one] + own[end:])
    for cut in range(1, num):
        found |= {own[cut:] + own[:cut], own[cut:-1] + own[:cut] + own[-1:]}
    found.discard(own)
    return torch.tensor(sorted(found), dtype=torch.long).view(-1, num)
