"""Counted nouns, and the name that was probably meant."""

from __future__ import annotations

import pytest

from unmask.wording import count_noun, did_you_mean


def test_one_is_singular():
    assert [count_noun(number, "text") for number in (0, 1, 2)] == ["0 texts", "1 text", "2 texts"]
    assert [count_noun(number, "prefix", "prefixes") for number in (1, 2)] == ["1 prefix", "2 prefixes"]


@pytest.mark.parametrize(
    ("name", "known", "sentence"),
    [
        ("nosie", ("clip", "noise"), " Did you mean 'noise'?"),
        ("Next", ("next-token", "classification"), " Did you mean 'next-token'?"),
        ("lion", ("sgd", "adamw"), ""),
        ("", ("sgd",), ""),
        (3, ("sgd",), ""),
    ],
)
def test_only_a_close_name_is_suggested(name, known, sentence):
    assert did_you_mean(name, known) == sentence
