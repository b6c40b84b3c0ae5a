"""What a model knows through its tokenizer, and what it says without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from unmask.audit.findings.text_marks import pieces_of
from unmask.errors import InputError
from unmask.models.vocabulary import Vocabulary


def vocabulary(**tokenizer: Any) -> Vocabulary:
    made = Vocabulary()
    made.tokenizer = SimpleNamespace(**tokenizer) if tokenizer else None
    return made


def word_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A real tokenizer that frames texts by a template."""
    words = {"<s>": 0, "a": 1, "</s>": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a")


@pytest.mark.parametrize(
    ("template", "frame"),
    [("<s> $A </s>", (0, 2)), ("<s> $A", None), ("$A </s>", None), ("$A", None)],
)
def test_the_tokenizer_is_asked_how_it_frames_a_text(template, frame):
    made = Vocabulary()
    made.tokenizer = word_tokenizer(template)
    assert made.frame_tokens == frame  # token 0 is a token, as in RoBERTa's vocabulary


@pytest.mark.parametrize(
    ("template", "tokens", "text"),
    [
        ("<s> $A </s>", [0, 1, 1, 2], "a a"),
        ("<s> $A </s>", [0, 1], "a"),  # cut
        ("<s> $A </s>", [1, 2], "a </s>"),  # no frame: the end is data
        ("<s> $A </s>", [0, 0, 1, 2, 1, 2, 2], "<s> a </s> a </s>"),  # what stands inside the frame is data
        ("<s> $A </s>", [0, 2], "<s> </s>"),  # nothing else: an empty text
        ("<s> $A </s>", [0], "<s>"),
        ("<s> $A </s>", [], ""),
        ("<s> $A", [0, 1, 2], "a </s>"),
        ("$A </s>", [0, 1, 2], "<s> a"),
        ("$A", [0, 1, 2], "<s> a </s>"),  # this tokenizer adds neither
    ],
)
def test_a_text_is_shown_without_what_the_tokenizer_adds(template, tokens, text):
    made = Vocabulary()
    made.tokenizer = word_tokenizer(template)
    assert made.decode(tokens) == text
    pieces = pieces_of(tokens, made)
    assert (len(pieces), "".join(pieces)) == (len(tokens), text)


def test_how_texts_are_framed_is_asked_once(monkeypatch):
    made, asked = Vocabulary(), []
    made.tokenizer = word_tokenizer("<s> $A </s>")
    call = PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "__call__", lambda *given, **how: asked.append(1) or call(*given, **how)
    )
    assert [made.decode([0, 1, 2]) for _ in range(3)] == ["a"] * 3
    assert len(asked) == 1


def test_special_tokens_are_those_of_the_tokenizer():
    assert vocabulary(all_special_ids=[101, 102, 0, 102]).special_tokens == {0, 101, 102}
    assert vocabulary().special_tokens == frozenset()


def test_without_a_tokenizer_texts_are_refused_and_tokens_shown_as_numbers():
    with pytest.raises(InputError, match="tokenizer"):
        vocabulary().encode("hello")
    assert vocabulary().decode([5, 17]) == "5 17"
    assert vocabulary().decode([]) == ""
    assert vocabulary().special_frame == ((), ())


def test_real_tokenizers_have_a_frame_or_none(minilm, smollm2):
    assert minilm.frame_tokens == (101, 102)
    assert tuple(minilm.encode("hello")[i] for i in (0, -1)) == minilm.frame_tokens
    assert set(minilm.frame_tokens) <= minilm.special_tokens
    assert smollm2.frame_tokens is None  # texts of a decoder begin and end with nothing


def test_models_are_vocabularies(tiny):
    assert isinstance(tiny, Vocabulary)
    assert tiny.frame_tokens is None  # no tokenizer
