"""Texts that are nearly right, corrected by what they leave of the embeddings' gradients.

If a text has token a where b is right, what arrives there is missing in b's row and too much in a's. So each edit is
ranked by what it would explain of the rest R if what arrives stayed as it is, at no cost:

    replace at p    2·w·⟨R_b − R_a, δ_p⟩ − 2·w²·‖δ_p‖²
    swap p and q    2·⟨R_b − R_a, D⟩ − 2·‖D‖²,  D = w·(δ_p − δ_q), in one text, or of one position in two texts

The best of each round are run, and those taken that leave less, one for each text. Ends are moved the same way. Before
them, every text is read anew from what the others leave: if these are right, the row of a token that stands once is the
row of its position. After them, where none leaves less, all orders of near tokens are run (what arrives at neighbours
is much alike, and ranks tell little), and texts with a token more or less.

Limits: it starts from texts that are nearly right, all but one or two. It is no proof. Cost: see `input_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.gradients.encoder.input_gradients import Fit, InputGradients, Tokens
from unmask.attacks.run import Run

_GAIN = 0.995  # of what was left: an edit that leaves more is none
_WIDTHS = (24, 48, 96, 192)  # edits that are run in a round; more after a round without gain
_LAST_STAGE = len(_WIDTHS) + 1
_NUM_ENDS = 3  # lengths that are tried of a text that is read anew
_NUM_INSERTED = 3  # tokens that are tried between two others
_NEAR = 4  # tokens in a row, each two of which are swapped, and three of which are turned, once nothing else helps
_MOST_ROUNDS = 60

Edit = tuple[tuple[int, Tokens], ...]  # texts by their index, as they would be


@dataclass
class ReplayEdits:
    """Edits of some texts; `possible` says which token may be put at which position."""

    gradients: InputGradients
    possible: Bool[Tensor, "p t"]
    num_rounds: int = field(default=0, init=False)

    def improve(self, run: Run, texts: Sequence[Tokens]) -> tuple[list[Tokens], float]:
        """The texts after rounds of edits, and what they leave of the rows."""
        current, stage = list(texts), 0
        fit = self.gradients.fit(current)
        tried: set[Edit] = set()
        while fit.left > self.gradients.floor and stage <= _LAST_STAGE and self.num_rounds < _MOST_ROUNDS:
            run.progress("correcting texts", self.num_rounds, _MOST_ROUNDS)
            edits = self._edits(stage, current, fit, tried)
            tried.update(edits)
            changed, following = self._take(current, fit, edits)
            stage = stage + 1 if changed == current else 0
            current, fit = changed, following
            self.num_rounds += 1
        return current, fit.left

    def _edits(self, stage: int, texts: Sequence[Tokens], fit: Fit, tried: Collection[Edit]) -> list[Edit]:
        """What is run next: texts read anew, ranked edits, more of them, or other orders."""
        if stage == 0:
            return [edit for edit in self._read_anew(texts, fit) if edit not in tried]
        if stage == _LAST_STAGE:
            return [edit for edit in (*_reorder(texts), *self._insert(texts, fit)) if edit not in tried]
        return [edit for edit in self._rank(texts, fit) if edit not in tried][: _WIDTHS[stage - 1]]

    def _take(self, texts: list[Tokens], fit: Fit, edits: Sequence[Edit]) -> tuple[list[Tokens], Fit]:
        """Texts after the best edits, no text twice, each of which leaves less."""
        self.gradients.prepare([text for edit in edits for _, text in edit])
        left = sorted((self.gradients.refit(fit, edit).left, edit) for edit in edits)
        current, used = list(texts), set[int]()
        for alone, edit in left:
            if alone > _GAIN * fit.left and not used:
                break
            if used & {index for index, _ in edit}:
                continue
            following = self.gradients.refit(fit, edit)
            if following.left < _GAIN * fit.left:
                fit = following
                for index, text in edit:
                    current[index] = text
                    used.add(index)
        return current, fit

    def _read_anew(self, texts: Sequence[Tokens], fit: Fit) -> Iterator[Edit]:
        """Each text from what the others leave: of every position the token whose row is most like its own."""
        gradients = self.gradients
        for index, text in enumerate(texts):
            rest = gradients.rest_without(fit, index)
            words, places = rest[: gradients.num_tokens], rest[gradients.num_tokens :]
            apart = words.square().sum(1) - 2 * places @ words.T  # ‖place − word‖², less what all words share
            likely = apart.masked_fill(~self.possible, torch.inf).argmin(1)
            ends = apart[2:, int(gradients.indices(text[-1:]))].topk(min(_NUM_ENDS, len(places) - 2), largest=False)
            for end in (ends.indices + 2).tolist():
                inner = gradients.tokens[likely[1:end]].tolist()
                yield ((index, (text[0], *inner, text[-1])),)

    def _rank(self, texts: Sequence[Tokens], fit: Fit) -> list[Edit]:
        """Edits that would explain most of the rest, the best first; moves of ends before them."""
        rest = self.gradients.rest(fit)
        scaled = [
            weight * self.gradients.arriving(text) for weight, text in zip(fit.weights.tolist(), texts, strict=True)
        ]
        found: list[tuple[float, Edit]] = []
        for index, text in enumerate(texts):
            found += self._replace(index, text, scaled[index], rest)
            found += self._swap(index, text, scaled[index], rest)
            for other in range(index):
                found += self._swap_between((index, other), texts, scaled, rest)
        found.sort(key=lambda item: -item[0])
        return [edit for _, edit in found]

    def _replace(
        self, index: int, text: Tokens, scaled: Float[Tensor, "i d"], rest: Float[Tensor, "r d"]
    ) -> Iterator[tuple[float, Edit]]:
        """Another token at one position, the best few; and the text that ends one token earlier, or later."""
        gradients, own = self.gradients, self.gradients.indices(text)
        products = scaled @ rest[: gradients.num_tokens].T
        gains = 2 * (products - products.gather(1, own[:, None])) - 2 * scaled.square().sum(1, keepdim=True)
        allowed = self.possible[: len(text)].clone()
        allowed[[0, -1]] = False
        allowed.scatter_(1, own[:, None], False)
        gains = gains.masked_fill(~allowed, -torch.inf)
        best = gains.flatten().topk(min(_WIDTHS[-1], int(allowed.sum())))
        for gain, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            position, token = divmod(place, gradients.num_tokens)
            other = int(gradients.tokens[token])
            yield gain, ((index, (*text[:position], other, *text[position + 1 :])),)
        top = max(best.values[:1].tolist(), default=0.0)
        if len(text) > 3:
            yield top, ((index, (*text[:-2], text[-1])),)
        if len(text) < len(self.possible):
            last = products[-1].masked_fill(~self.possible[len(text) - 1], -torch.inf)
            for place in last.topk(min(4, int(self.possible[len(text) - 1].sum()))).indices.tolist():
                yield top, ((index, (*text[:-1], int(gradients.tokens[place]), text[-1])),)

    def _insert(self, texts: Sequence[Tokens], fit: Fit) -> Iterator[Edit]:
        """A token more, between any two: those whose rows lack most of what arrives beside it, or that end others."""
        words = self.gradients.rest(fit)[: self.gradients.num_tokens]
        for index, (weight, text) in enumerate(zip(fit.weights.tolist(), texts, strict=True)):
            arriving = weight * self.gradients.arriving(text)
            between = (arriving[:-1] + arriving[1:]) / 2  # before position 1, 2 …
            likely = (between @ words.T).topk(min(_NUM_INSERTED, len(words))).indices
            added = self.gradients.tokens[likely].tolist()
            added[-1] += sorted({other[-2] for other in texts} - set(added[-1]))
            for p, tokens in enumerate(added if len(text) < len(self.possible) else (), start=1):
                yield from (((index, (*text[:p], token, *text[p:])),) for token in tokens)

    def _swap(
        self, index: int, text: Tokens, scaled: Float[Tensor, "i d"], rest: Float[Tensor, "r d"]
    ) -> Iterator[tuple[float, Edit]]:
        """Two tokens of a text in each other's place, wherever the spans have seen them: near places look alike."""
        inner = range(1, len(text) - 1)
        rows = rest[self.gradients.indices(text)]
        products = scaled @ rows.T  # (p, q): what arrives at p, in the row of q's token
        squares = scaled @ scaled.T
        sizes = squares.diagonal()
        diagonal = products.diagonal()
        gains = 2 * (products + products.T - diagonal[:, None] - diagonal) - 2 * (sizes[:, None] + sizes - 2 * squares)
        for p in inner:
            for q in range(p + 1, len(text) - 1):
                if text[p] != text[q]:
                    changed = list(text)
                    changed[p], changed[q] = text[q], text[p]
                    yield float(gains[p, q]), ((index, tuple(changed)),)

    def _swap_between(
        self,
        pair: tuple[int, int],
        texts: Sequence[Tokens],
        scaled: Sequence[Float[Tensor, "i d"]],
        rest: Float[Tensor, "r d"],
    ) -> Iterator[tuple[float, Edit]]:
        """The tokens of one position in two texts, each in the other's place."""
        (one, two), length = (texts[pair[0]], texts[pair[1]]), min(len(texts[index]) for index in pair) - 1
        first, second = (rest[self.gradients.indices(text)[:length]] for text in (one, two))
        change = scaled[pair[0]][:length] - scaled[pair[1]][:length]
        gains = (2 * ((second - first) * change).sum(1) - 2 * change.square().sum(1)).tolist()
        for p in range(1, length):
            if one[p] != two[p]:
                changed = (*one[:p], two[p], *one[p + 1 :]), (*two[:p], one[p], *two[p + 1 :])
                yield gains[p], tuple(zip(pair, changed, strict=True))


def _reorder(texts: Sequence[Tokens]) -> Iterator[Edit]:
    """Every text with two near tokens swapped, or three in a row turned, or one left out."""
    for index, text in enumerate(texts):
        changed = set[Tokens]()
        for p in range(1, len(text) - 1):
            changed |= {(*text[:p], *text[p + 1 :])} if len(text) > 3 else set()
            for q in range(p + 1, min(p + _NEAR, len(text) - 1)):
                changed.add((*text[:p], text[q], *text[p + 1 : q], text[p], *text[q + 1 :]))
            if p + 3 < len(text):
                a, b, c = text[p : p + 3]
                changed |= {(*text[:p], *turned, *text[p + 3 :]) for turned in ((b, c, a), (c, a, b))}
        yield from (((index, other),) for other in sorted(changed - {text}))
