"""Texts as pieces with marks: which token was recovered at its place, which only as a word of the bag, which not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise, takewhile, zip_longest

from unmask.audit.finding import TextPair
from unmask.models.vocabulary import Vocabulary
from unmask.recovery import RecoveredTexts

Marked = tuple[tuple[str, str], ...]
PLACE, BAG, NO = "place", "bag", "no"


def pair_texts(
    recovered: RecoveredTexts,
    true: Sequence[Sequence[int]] | None,
    assignment: Sequence[int | None],
    vocabulary: Vocabulary,
) -> tuple[TextPair, ...]:
    """Every true text beside the recovered one that it was assigned, then the recovered ones that nothing was.

    Without true texts, the recovered ones alone.
    """
    found = [(text, tokens) for text in recovered.texts for tokens in [text.tokens] * text.count]
    known = recovered.token_set.union(*(text.tokens for text in recovered.texts))
    held = set().union(*map(set, true or ()))
    pairs = []
    for tokens, partner in zip(true or (), assignment, strict=True):
        other = found[partner][1] if partner is not None else None
        pairs.append(
            TextPair(
                true=marked(tokens, other or (), known, vocabulary),
                recovered=None if other is None else marked(other, tokens, held, vocabulary),
                certain=partner is not None and found[partner][0].certain,
                exact=other is not None and list(other) == list(tokens),
            )
        )
    strangers = [place for place in range(len(found)) if place not in assignment]
    for place in strangers:
        text, tokens = found[place]
        pieces = marked(tokens, (), held if true is not None else known, vocabulary)
        pairs.append(TextPair(None, pieces, text.certain, False))
    return tuple(pairs)


def mark_bag(recovered: RecoveredTexts, held: Collection[int] | None, vocabulary: Vocabulary) -> Marked:
    """The bag of words, each as a piece of its own; marked right where nobody knows better."""
    return tuple(
        (vocabulary.decode([token]), BAG if held is None or token in held else NO)
        for token in sorted(recovered.token_set)
    )


def marked(tokens: Sequence[int], other: Sequence[int], bag: Collection[int], vocabulary: Vocabulary) -> Marked:
    """A text's pieces, marked by whether the other text has the token at this place, or the bag has it at all."""
    pieces = pieces_of(tokens, vocabulary)
    marks = [
        PLACE if token == twin else BAG if token in bag else NO
        for token, twin in zip_longest(tokens, other[: len(tokens)])
    ]
    return tuple(zip(pieces, marks, strict=True))


def pieces_of(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """What each token adds to the text, so that the pieces join to it.

    A token that is part of a character adds nothing that can be shown; the one that completes it adds the character.
    """
    text = vocabulary.decode(tokens)
    cuts = [0]
    for end in range(1, len(tokens)):
        so_far = zip(vocabulary.decode(tokens[:end]), text, strict=False)
        cuts.append(max(cuts[-1], len([*takewhile(lambda pair: pair[0] == pair[1], so_far)])))
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])] if tokens else []
