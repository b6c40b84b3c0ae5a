"""Marks: pieces join to the text, whatever the tokenizer does, and each mark says what is known of its token."""

from __future__ import annotations

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.audit.made import HOSTILE
from tests.tiny_models import word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from unmask.audit.findings.finding import OpenPoint, TextPair
from unmask.audit.findings.text_marks import mark_bag, mark_text, pair_texts, pieces_of
from unmask.errors import UnknownModelError
from unmask.models.catalog import CATALOG, resolve
from unmask.models.vocabulary import Vocabulary
from unmask.recovery import Ambiguity, AmbiguityKind, RecoveredText, RecoveredTexts


class Words(Vocabulary):
    """'w5' … as tokens."""

    tokenizer = word_tokenizer()


class Bytes(Vocabulary):
    """Every token is a byte, as the smallest of GPT-2's; characters take up to four."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)


class Rewriting(Vocabulary):
    """A decoder that joins what came before in another way, as clean-up of spaces does."""

    tokenizer = None

    def decode(self, tokens: object) -> str:
        words = [("don", "'", "t", "stop")[token] for token in tokens]  # type: ignore[attr-defined]
        return " ".join(words).replace(" ' ", "'")


BYTES = Bytes()


@given(text=st.text(max_size=12))
def test_pieces_join_to_the_text(text):
    tokens = BYTES.encode(text)
    pieces = pieces_of(tokens, BYTES)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == BYTES.decode(tokens) == text


@given(tokens=st.lists(st.integers(0, 255), max_size=12))
def test_pieces_of_bytes_that_are_no_text_join_too(tokens):
    pieces = pieces_of(tokens, BYTES)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


def test_the_byte_that_completes_a_character_shows_it():
    assert pieces_of(BYTES.encode("aä漢!"), BYTES) == ["a", "", "ä", "", "", "漢", "!"]


def test_an_unfinished_character_is_not_lost():
    tokens = BYTES.encode("a漢")[:-1]
    pieces = pieces_of(tokens, BYTES)
    assert (len(pieces), "".join(pieces)) == (3, "a\ufffd")


def test_a_decoder_that_rewrites_still_gives_the_text():
    for end in range(5):
        tokens = list(range(end))
        assert "".join(pieces_of(tokens, Rewriting())) == Rewriting().decode(tokens)
        assert len(pieces_of(tokens, Rewriting())) == end


@pytest.mark.parametrize("name", CATALOG)
def test_the_pieces_of_real_tokenizers_join(name):
    try:
        folder = resolve(name)
    except UnknownModelError as error:  # the message names the command that brings it
        pytest.skip(f"a real tokenizer is missing: {error}")
    vocabulary = Vocabulary()
    vocabulary.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = vocabulary.encode("Don't pay 48,200 euros — naïve café 漢字 🙂🏽 \u202eevil\tend")
    assert "".join(pieces_of(tokens, vocabulary)) == vocabulary.decode(tokens)


def test_marks_of_a_text():
    pieces = mark_text([5, 6, 7, 8], [5, 7, 9], {7, 6}, Words())
    assert pieces == (("w5", "place"), (" w6", "bag"), (" w7", "bag"), (" w8", "no"))


def test_a_longer_other_text_adds_nothing():
    assert mark_text([5], [5, 6, 7], (), Words()) == (("w5", "place"),)
    assert mark_text([], [5], (), Words()) == ()


def recovered(*texts: tuple[int, ...], bag: tuple[int, ...] = (), count: int = 1) -> RecoveredTexts:
    made = tuple(RecoveredText(tokens, "", number == 0, 0.0, count) for number, tokens in enumerate(texts))
    return RecoveredTexts(made, frozenset(bag))


def test_true_texts_beside_recovered_ones_then_strangers():
    found = recovered((5, 6), (7, 99), (50,), bag=(9,))
    words = {"exact": [False, True, False], "near_exact": [True, True, False]}
    pairs = pair_texts(found, [[7, 8], [5, 6], [9]], [1, 0, None], Words(), **words)
    whole = (("w5", "place"), (" w6", "place"))
    assert pairs == (
        TextPair((("w7", "place"), (" w8", "no")), (("w7", "place"), (" w99", "no")), near_exact=True),
        TextPair(whole, whole, certain=True, exact=True, near_exact=True),
        TextPair((("w9", "bag"),), None),
        TextPair(None, (("w50", "no"),)),
    )


def test_a_text_that_occurs_twice_has_two_partners():
    pairs = pair_texts(recovered((5, 6), count=2), [[5, 6], [5, 6]], [0, 1], Words())
    assert [pair.certain for pair in pairs] == [True, True]
    pairs = pair_texts(recovered((5, 6), count=2), [[5, 6]], [0], Words())
    assert [pair.true is None for pair in pairs] == [False, True]


def test_without_true_texts_there_are_only_recovered_ones():
    (pair,) = pair_texts(recovered((5, 6)), None, (), Words())
    assert pair == TextPair(None, (("w5", "bag"), (" w6", "bag")), certain=True)


def test_what_the_evidence_leaves_open_is_spelled_out():
    equal = Ambiguity(AmbiguityKind.EQUAL_TOKENS, "these two look alike", 1, (6, 7))
    text = RecoveredText((5, 6), "", False, 0.0, ambiguities=(equal, Ambiguity(AmbiguityKind.OPEN_END, "it may go on")))
    points = (OpenPoint("equal_tokens", "these two look alike", 1, ("w6", "w7")), OpenPoint("open_end", "it may go on"))
    found = RecoveredTexts((text,))
    assert [pair.ambiguities for pair in pair_texts(found, [[5, 7]], [0], Words())] == [points]
    assert [pair.ambiguities for pair in pair_texts(found, None, (), Words())] == [points]


def test_the_bag_of_words():
    found = recovered(bag=(9, 7, 5))
    assert mark_bag(found, {5, 9}, Words()) == (("w5", "bag"), ("w7", "no"), ("w9", "bag"))
    assert {mark for _, mark in mark_bag(found, None, Words())} == {"bag"}
    assert mark_bag(recovered(), None, Words()) == ()


@pytest.mark.parametrize("text", [HOSTILE.replace("\ud800", ""), "\x00" * 5])
def test_hostile_text_stays_as_it_is(text):
    """Marks are data; whoever shows them escapes them."""
    assert "".join(piece for piece, _ in mark_text(BYTES.encode(text), (), (), BYTES)) == text
