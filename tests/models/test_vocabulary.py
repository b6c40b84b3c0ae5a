"""What a model knows through its tokenizer, and what it says without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unmask.errors import InputError
from unmask.models.vocabulary import Vocabulary


def vocabulary(**tokenizer: Any) -> Vocabulary:
    made = Vocabulary()
    made.tokenizer = SimpleNamespace(**tokenizer) if tokenizer else None
    return made


def test_the_frame_is_the_tokenizers_cls_and_sep():
    assert vocabulary(cls_token_id=101, sep_token_id=102).frame_tokens == (101, 102)


def test_token_0_is_a_token():
    assert vocabulary(cls_token_id=0, sep_token_id=2).frame_tokens == (0, 2)  # as in RoBERTa's vocabulary


@pytest.mark.parametrize(
    "tokenizer",
    [
        {},
        {"cls_token_id": 101},
        {"sep_token_id": 102},
        {"cls_token_id": 101, "sep_token_id": None},
        {"cls_token_id": None, "sep_token_id": None, "bos_token_id": 1},
    ],
)
def test_without_both_there_is_no_frame(tokenizer):
    assert vocabulary(**tokenizer).frame_tokens is None


def test_special_tokens_are_those_of_the_tokenizer():
    assert vocabulary(all_special_ids=[101, 102, 0, 102]).special_tokens == {0, 101, 102}
    assert vocabulary().special_tokens == frozenset()


def test_without_a_tokenizer_texts_are_refused_and_tokens_shown_as_numbers():
    with pytest.raises(InputError, match="tokenizer"):
        vocabulary().encode("hello")
    assert vocabulary().decode([5, 17]) == "5 17"
    assert vocabulary().decode([]) == ""


def test_real_tokenizers_have_a_frame_or_none(minilm, smollm2):
    assert minilm.frame_tokens == (101, 102)
    assert tuple(minilm.encode("hello")[i] for i in (0, -1)) == minilm.frame_tokens
    assert set(minilm.frame_tokens) <= minilm.special_tokens
    assert smollm2.frame_tokens is None  # texts of a decoder begin and end with nothing


def test_models_are_vocabularies(tiny):
    assert isinstance(tiny, Vocabulary)
    assert tiny.frame_tokens is None  # no tokenizer
