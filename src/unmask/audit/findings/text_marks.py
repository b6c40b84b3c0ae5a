"""Texts as pieces with marks: which token was recovered at its place, which only as a word of the bag, which not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise, takewhile, zip_longest

from unmask.audit.findings.finding import OpenPoint, TextPair
from unmask.models.vocabulary import Vocabulary
from unmask.recovery import RecoveredText, RecoveredTexts

Marked = tuple[tuple[str, str], ...]
PLACE, BAG, NO = "place", "bag", "no"


def pair_texts(
    recovered: RecoveredTexts,
    true: Sequence[Sequence[int]] | None,
    assignment: Sequence[int | None],
    vocabulary: Vocabulary,
    exact: Sequence[bool] = (),
    near_exact: Sequence[bool] = (),
) -> tuple[TextPair, ...]:
    """Every true text beside the recovered one that it was assigned, then the recovered ones that nothing was.

    Without true texts, the recovered ones alone. `exact` and `near_exact` are the score's words on each true text.
    """
    found = [(text, tokens) for text in recovered.texts for tokens in [text.tokens] * text.count]
    known = recovered.token_set.union(*(text.tokens for text in recovered.texts))
    held = set().union(*map(set, true or ()))
    pairs = []
    for place, (tokens, partner) in enumerate(zip(true or (), assignment, strict=True)):
        text, other = found[partner] if partner is not None else (None, None)
        pairs.append(
            TextPair(
                true=mark_text(tokens, other or (), known, vocabulary),
                recovered=None if other is None else mark_text(other, tokens, held, vocabulary),
                certain=text is not None and text.certain,
                exact=place < len(exact) and exact[place],
                near_exact=place < len(near_exact) and near_exact[place],
                ambiguities=() if text is None else open_points(text, vocabulary),
            )
        )
    strangers = [place for place in range(len(found)) if place not in assignment]
    for place in strangers:
        text, tokens = found[place]
        pieces = mark_text(tokens, (), held if true is not None else known, vocabulary)
        pairs.append(TextPair(None, pieces, text.certain, ambiguities=open_points(text, vocabulary)))
    return tuple(pairs)


def open_points(text: RecoveredText, vocabulary: Vocabulary) -> tuple[OpenPoint, ...]:
    """What the evidence leaves open about a text, with the tokens that may stand there spelled out."""
    return tuple(
        OpenPoint(one.kind.value, one.reason, one.position, tuple(vocabulary.decode([token]) for token in one.tokens))
        for one in text.ambiguities
    )


def mark_bag(recovered: RecoveredTexts, held: Collection[int] | None, vocabulary: Vocabulary) -> Marked:
    """The bag of words, each as a piece of its own; marked right where nobody knows better."""
    return tuple(
        (vocabulary.decode([token]), BAG if held is None or token in held else NO)
        for token in sorted(recovered.token_set)
    )


def mark_text(tokens: Sequence[int], other: Sequence[int], bag: Collection[int], vocabulary: Vocabulary) -> Marked:
    """A text's pieces, marked by whether the other text has the token at this place, or the bag has it at all."""
    pieces = pieces_of(tokens, vocabulary)
    marks = [
        PLACE if token == other_token else BAG if token in bag else NO
        for token, other_token in zip_longest(tokens, other[: len(tokens)])
    ]
    return tuple(zip(pieces, marks, strict=True))


def pieces_of(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """What each token adds to the text, so that the pieces join to it.

    A token that is part of a character adds nothing that can be shown; the one that completes it adds the character.
    Nor do the special tokens around a text add anything.
    """
    text = vocabulary.decode(tokens)
    first, last = vocabulary.inside(tokens)
    cuts = [0] * (first + 1)
    for end in range(first + 1, last):
        so_far = zip(vocabulary.decode(tokens[first:end]), text, strict=False)
        cuts.append(max(cuts[-1], len([*takewhile(lambda pair: pair[0] == pair[1], so_far)])))
    cuts += [len(text)] * (len(tokens) - last)
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])] if tokens else []
