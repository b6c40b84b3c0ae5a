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
    text: Int[Tensor, " n"], continues: Bool[Tensor, " vocab"], at_most: int, generator: torch.Generator
) -> TextBatch:
    """One text in other orders."""
    begins = ~continues.to(text.device)[text]
    begins[0] = True
    word = begins.long().cumsum(0) - 1
    place = torch.arange(len(text), device=text.device)
    within = place - place[begins][word]
    num_words = int(word[-1]) + 1
    words = text.new_full((num_words, int(within.max()) + 1), EMPTY)
    words[word, within] = text
    orders = word_orders(num_words)
    if len(orders) > at_most:
        orders = orders[torch.randperm(len(orders), generator=generator)[:at_most]]
    return squeeze(words[orders.to(text.device)].flatten(1))


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
