"""Words of a text in other forms: two written as one, with another ending or beginning; cut into tokens anew.

A rare word is several tokens that say little alone ('over', '##hea', '##ted'), so that a search by single tokens passes
it by; but what it finds instead is often made of the same parts ('over', 'heated').
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.orders import continuing_tokens, split_words
from unmask.models.adapter import Model

_ENDINGS = ("s", "es", "d", "ed", "ing", "ly", "er", "est", "y", "ness", "less", "ful", "able", "al", "ity", "ment")
_BEGINNINGS = ("un", "re", "in", "im", "dis", "over", "out", "under", "mis", "non", "pre", "sub")
Word = tuple[int, ...]


@dataclass
class Respeller:
    """A tokenizer, and the words that it has cut already."""

    model: Model
    continues: Bool[Tensor, " vocab"] = field(init=False)
    _frame: tuple[int, ...] = field(init=False)  # special tokens in front of every text, and behind it
    _pieces: dict[str, Word] = field(default_factory=dict)
    _names: dict[Word, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.continues = continuing_tokens(self.model)
        self._frame = tuple(map(len, self.model.special_frame))

    def __call__(self, texts: TextBatch, widely: bool) -> tuple[Int[Tensor, " k"], TextBatch]:
        """Texts with two words joined; `widely`: or with one word in another form. Which text each is of, and they."""
        device = texts.tokens.device
        split = split_words(texts, self.continues).tolist() if self.model.tokenizer is not None else []
        words = [[tuple(token for token in word if token >= 0) for word in text if word[0] >= 0] for text in split]
        found = [self._respell(text, widely) for text in words]
        rows = [row for row, several in enumerate(found) for _ in several]
        return torch.tensor(rows, dtype=torch.long).to(device), TextBatch.of(
            [t for each in found for t in each], device
        )

    def _respell(self, words: list[Word], widely: bool) -> list[Word]:
        names = [self._name(word) for word in words]
        found: dict[Word, None] = {}
        for place in range(len(words)):
            for last, forms in self._forms(names, place, widely):
                before, after = sum(words[:place], ()), sum(words[last:], ())
                for pieces in self._cut(forms):
                    found[(*before, *pieces, *after)] = None
        found.pop(sum(words, ()), None)
        return list(found)

    def _forms(self, names: list[str], place: int, widely: bool) -> Iterator[tuple[int, list[str]]]:
        """What may stand in place of a word, and of it and the next one; with the place behind them."""
        one, other = names[place], names[place + 1] if place + 1 < len(names) else ""
        if one.isalpha() and widely:
            yield place + 1, other_forms(one)
        if one.isalpha() and other.isalpha():
            yield place + 2, [one + other]

    def _name(self, word: Word) -> str:
        if word not in self._names:
            self._names[word] = self.model.decode(list(word)).strip()
        return self._names[word]

    def _cut(self, forms: list[str]) -> list[Word]:
        opening, closing = self._frame
        for form in forms:
            if form not in self._pieces:
                framed = self.model.encode(f" {form}")
                self._pieces[form] = tuple(framed[opening : len(framed) - closing])
        return [self._pieces[form] for form in forms]


def other_forms(word: str) -> list[str]:
    """A word with another ending or beginning, or without the one it has."""
    forms = [word + ending for ending in _ENDINGS] + [beginning + word for beginning in _BEGINNINGS]
    forms += [word[: -len(ending)] for ending in _ENDINGS if word.endswith(ending)]
    forms += [word[len(beginning) :] for beginning in _BEGINNINGS if word.startswith(beginning)]
    stems = [word[: -len(ending)] for ending in ("e", "y", "s", "ed", "ing") if word.endswith(ending)]
    forms += [stem + ending for stem in stems for ending in ("ed", "ing", "er", "ies", "ied", "es", "e")]
    return [form for form in dict.fromkeys(forms) if len(form) > 1 and form != word]
