"""Texts as a person reads them: when two are the same text, and when one is the other but for a few characters."""

from __future__ import annotations

import unicodedata
from collections import Counter

import numpy as np

_SLIPS = 2  # a final full stop and one more sign may always differ
_SHARE = 20  # beyond that, one character in twenty: nobody is kept from reading by so few
_LEAST_KNOWN = 4  # of a short text at most one character in four may differ


def normalise_text(text: str, ignore_case: bool = False) -> str:
    """The text without what a reader does not see: one form of each character (NFC), single spaces, none at the ends.

    `ignore_case` is for models that never see capital letters.
    """
    composed = unicodedata.normalize("NFC", text.casefold() if ignore_case else text)
    return " ".join(composed.split())


def count_allowed_edits(num_characters: int) -> int:
    """How many characters of a true text may differ in a near-exact one.

        max(2, n/20), but at most n/4

    Two absorb the signs at the end that attacks lose first. 5 % of a longer text leave every sentence readable; other
    texts of one language differ in about three characters of four, so chance gives none. Below four characters a text
    is exact or not.
    """
    return min(max(_SLIPS, num_characters // _SHARE), num_characters // _LEAST_KNOWN)


def is_near_exact(recovered: str, true: str) -> bool:
    """Whether a recovered text is the true one, but for a few characters that are wrong, missing or too many."""
    limit = count_allowed_edits(len(true))
    return edit_distance(recovered, true, limit) <= limit


def edit_distance(first: str, second: str, limit: int) -> int:
    """Levenshtein's distance, or `limit + 1` where it is larger than the limit.

        D[i, j] = min(D[i-1, j] + 1, D[i, j-1] + 1, D[i-1, j-1] + [a_i ≠ b_j])

    Notation: a, b the texts; D[i, j] the least number of insertions, deletions and substitutions that turn the first i
    characters of a into the first j of b. A row at a time; the insertions of a row are a running minimum.
    Cost: length times length, but nothing where lengths or letters alone already differ by more than the limit.
    Source: Wagner and Fischer, 'The string-to-string correction problem', 1974.
    """
    if first == second:
        return 0
    a, b = Counter(first), Counter(second)
    if max((a - b).total(), (b - a).total()) > limit:  # each edit repairs one letter of either side
        return limit + 1
    codes = np.array([ord(character) for character in second], dtype=np.int64)
    places = np.arange(len(second) + 1)
    row = places.copy()
    for character in first:
        changed = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(character)))
        row = np.concatenate(([row[0] + 1], changed))
        row = np.minimum.accumulate(row - places) + places
        if row.min() > limit:
            return limit + 1
    return min(int(row[-1]), limit + 1)
