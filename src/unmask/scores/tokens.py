"""Recovered token sequences against the true batch: exact and near-exact texts, ROUGE, bag of tokens."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index
from statistics import fmean

import numpy as np
from scipy.optimize import linear_sum_assignment

from unmask.errors import InputError
from unmask.scores.reading import is_near_exact

Text = tuple[int, ...]
Words = Sequence[Hashable]
Covers = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class TextScore:
    """How much of a batch was recovered; rates and ROUGE F-measures are means over the true texts, 0 to 1."""

    exact_rate: float
    rouge1: float
    rouge2: float
    rougeL: float  # noqa: N815 (the measure's own name)
    token_precision: float  # share of the recovered tokens that the batch holds, with multiplicity
    token_recall: float  # share of the batch's tokens that were recovered, with multiplicity
    num_true: int
    num_recovered: int
    num_false: int  # recovered texts that equal no true text
    assignment: tuple[int | None, ...]  # for each true text the index of its recovered text
    exact: tuple[bool, ...] = ()  # for each true text
    near_exact: tuple[bool, ...] = ()  # for each true text; exact ones are near-exact too


def score_texts(
    recovered: Sequence[Sequence[int]],
    true: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str] | None = None,
    *,
    read: Callable[[Sequence[int]], str] | None = None,
    covers: Sequence[Covers] | None = None,
) -> TextScore:
    """Compare recovered texts with the true batch under the best one-to-one assignment.

        π = argmax Σ_i [r_π(i) = t_i], among these argmax Σ_i [r_π(i) ≈ t_i],
            and among these argmax Σ_i ROUGE-1(r_π(i), t_i) + ROUGE-2(r_π(i), t_i)
        exact_rate = (1/B) Σ_i [r_π(i) = t_i],   rouge = (1/B) Σ_i ROUGE(r_π(i), t_i)

    Notation: t_i the B true texts; r_j the recovered ones; π injective and partial; = equal and ≈ near-exact. ROUGE
    compares words (runs of a–z and 0–9 in the decoded text, lower case, no stemmer), or token ids if `decode` is not
    given. Texts are equal if their tokens are, or if `read` gives the same text for both, which is not empty: then
    another tokenisation is the same text. Near-exact: all but a few characters of that text (`is_near_exact`), or the
    true text is one of the alternatives that the recovered one stands for (`covers`, one for each recovered text).
    Limits: a recovered text is used once, so two equal true texts need two equal recoveries. A true text with
    no partner left, or none that shares a word with it, gets `None` and scores 0. As in rouge-score, a share
    of nothing is 0: an exact text of one word has ROUGE-2 = 0, one of no words has every ROUGE = 0 (but both
    count in `exact_rate`), and precision is 0 when nothing was recovered.
    Cost: ROUGE of each pair among the texts that are not exact, and an assignment cubic in their number.
    Source: Lin, 'ROUGE: a package for automatic evaluation of summaries', 2004; conventions of rouge-score.
    """
    recovered_texts, true_texts = _as_texts(recovered, "recovered"), _as_texts(true, "true")
    if not true_texts:
        raise InputError("true holds no text; a score needs at least one true text to compare with.")
    recovered_words = [_split_words(text, decode) for text in recovered_texts]
    true_words = [_split_words(text, decode) for text in true_texts]
    likeness = _Likeness(
        [_read(text, read) for text in recovered_texts], [_read(text, read) for text in true_texts], true_texts, covers
    )
    partner = _assign(recovered_texts, true_texts, recovered_words, true_words, likeness)
    pairs = [(recovered_words[partner[i]] if i in partner else (), words) for i, words in enumerate(true_words)]
    recovered_bag, true_bag = (Counter(chain.from_iterable(texts)) for texts in (recovered_texts, true_texts))
    num_common = (recovered_bag & true_bag).total()
    exact = tuple(
        i in partner and (recovered_texts[partner[i]] == text or likeness.is_same(i, partner[i]))
        for i, text in enumerate(true_texts)
    )
    known = set(true_texts)
    return TextScore(
        exact_rate=fmean(exact),
        rouge1=fmean(rouge_n(found, words, 1) for found, words in pairs),
        rouge2=fmean(rouge_n(found, words, 2) for found, words in pairs),
        rougeL=fmean(rouge_l(found, words) for found, words in pairs),
        token_precision=num_common / max(recovered_bag.total(), 1),
        token_recall=num_common / max(true_bag.total(), 1),
        num_true=len(true_texts),
        num_recovered=len(recovered_texts),
        num_false=sum(text not in known and likeness.is_strange(j) for j, text in enumerate(recovered_texts)),
        assignment=tuple(partner.get(i) for i in range(len(true_texts))),
        exact=exact,
        near_exact=tuple(
            is_exact or (i in partner and likeness.is_near(i, partner[i])) for i, is_exact in enumerate(exact)
        ),
    )


class _Likeness:
    """Whether a true text (by its index i) and a recovered one (j) are the same, or nearly, to a reader."""

    def __init__(
        self,
        recovered: list[str | None],
        true: list[str | None],
        true_texts: list[Text],
        covers: Sequence[Covers] | None,
    ) -> None:
        if covers is not None and len(covers) != len(recovered):
            raise InputError(f"covers must have one entry for each recovered text, got {len(covers)}.")
        self.recovered, self.true, self._true_texts, self._covers = recovered, true, true_texts, covers

    def is_same(self, i: int, j: int) -> bool:
        """Whether both read the same."""
        return bool(self.true[i]) and self.true[i] == self.recovered[j]

    def is_near(self, i: int, j: int) -> bool:
        """Whether a few characters differ, or the true text is an alternative of the recovered one."""
        if self._covers is not None and self._covers[j](self._true_texts[i]):
            return True
        true, recovered = self.true[i], self.recovered[j]
        return bool(true) and true is not None and recovered is not None and is_near_exact(recovered, true)

    def is_strange(self, j: int) -> bool:
        """Whether a recovered text reads as no true one, and stands for none."""
        covers = None if self._covers is None else self._covers[j]
        stands_for_one = covers is not None and any(covers(text) for text in self._true_texts)
        return not stands_for_one and not any(self.is_same(i, j) for i in range(len(self.true)))


def rouge_n(recovered: Words, true: Words, n: int) -> float:
    """ROUGE-N: F-measure of the n-grams in common, 2·|r ∩ t| / (|r| + |t|) over multisets; 0 without any."""
    if n < 1:
        raise InputError(f"n must be at least 1, got {n}.")
    recovered_ngrams, true_ngrams = _ngrams(recovered, n), _ngrams(true, n)
    num_common = (recovered_ngrams & true_ngrams).total()
    return _f_measure(num_common, recovered_ngrams.total(), true_ngrams.total())


def rouge_l(recovered: Words, true: Words) -> float:
    """ROUGE-L: F-measure of the longest common subsequence, 2·LCS(r, t) / (|r| + |t|); 0 without words."""
    code = {word: number for number, word in enumerate(dict.fromkeys(true))}
    true_codes = np.array([code[word] for word in true], dtype=np.int64)
    # length[j] is the LCS of the recovered words so far and the first j true words.
    length = np.zeros(len(true) + 1, dtype=np.int64)
    for word in recovered:
        extended = length[:-1] + (true_codes == code.get(word, -1))
        length[1:] = np.maximum.accumulate(np.maximum(length[1:], extended))
    return _f_measure(int(length[-1]), len(recovered), len(true))


def _ngrams(words: Words, n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(zip(*(words[start:] for start in range(n)), strict=False))


def _f_measure(num_common: int, num_recovered: int, num_true: int) -> float:
    return 2 * num_common / max(num_recovered + num_true, 1)


def _as_texts(sequences: Sequence[Sequence[int]], name: str) -> list[Text]:
    try:
        return [tuple(index(token) for token in sequence) for sequence in sequences]
    except TypeError as error:
        raise InputError(f"{name} must be a sequence of sequences of token ids, but {error}.") from error


def _split_words(text: Text, decode: Callable[[Sequence[int]], str] | None) -> Words:
    # Tokenisers of transformers take lists, not tuples.
    return text if decode is None else re.findall("[a-z0-9]+", decode(list(text)).lower())


def _read(text: Text, read: Callable[[Sequence[int]], str] | None) -> str | None:
    return None if read is None else read(list(text))


def _assign(
    recovered: list[Text],
    true: list[Text],
    recovered_words: list[Words],
    true_words: list[Words],
    likeness: _Likeness,
) -> dict[int, int]:
    """True index to recovered index: exact pairs, then near-exact ones, then the largest ROUGE-1 + ROUGE-2.

    Equal texts are interchangeable, so taking exact pairs first costs the remaining texts nothing. Pairs that share
    nothing are not made.
    """
    partner = _pair_equal(recovered, true, {}, set())
    partner = _pair_equal(likeness.recovered, likeness.true, partner, set(partner.values()))
    # Sorted, so that ties between equally good assignments do not depend on the order of the batch.
    used = set(partner.values())
    left_true = sorted(set(range(len(true))) - partner.keys(), key=lambda i: true[i])
    left_recovered = sorted(set(range(len(recovered))) - used, key=lambda j: recovered[j])

    gain = np.zeros((len(left_true), len(left_recovered)))
    more_than_all_words = 2.0 * len(true) + 1.0
    for row, column in np.ndindex(gain.shape):
        i, j = left_true[row], left_recovered[column]
        found, words = recovered_words[j], true_words[i]
        gain[row, column] = rouge_n(found, words, 1) + rouge_n(found, words, 2)
        gain[row, column] += more_than_all_words * likeness.is_near(i, j)
    for row, column in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
        if gain[row, column] > 0:
            partner[left_true[row]] = left_recovered[column]
    return partner


def _pair_equal(
    recovered: Sequence[Hashable], true: Sequence[Hashable], partner: dict[int, int], used: set[int]
) -> dict[int, int]:
    """More pairs, of texts that are equal and not taken; what reads as nothing equals nothing."""
    unused: defaultdict[Hashable, list[int]] = defaultdict(list)
    for j, text in enumerate(recovered):
        if j not in used and text not in (None, ""):
            unused[text].append(j)
    more = {i: unused[text].pop(0) for i, text in enumerate(true) if i not in partner and unused[text]}
    return {**partner, **more}
