from __future__ import annotations

import shlex
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.safe_text import code_span, make_safe, quote_word


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, ünïcode 漢字", "plain text, ünïcode 漢字"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("line\nend\r", "line\\nend\\r"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\ud800", "\\ud800"),
        ("a\u00a0b\u2028", "a\\xa0b\\u2028"),
        (None, "None"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_an_escape(text, expected):
    assert make_safe(text) == expected


def test_a_word_of_a_command_is_quoted_and_visible():
    assert quote_word("runs/x.safetensors") == "runs/x.safetensors"
    assert shlex.split(quote_word("my $(x) 'v'.safetensors")) == ["my $(x) 'v'.safetensors"]
    assert quote_word("a\nb\u202e") == r"$'a\x0ab\U0000202e'"


def test_an_endless_line_is_cut_and_says_so():
    assert make_safe("x" * 1_000_000, longest=10) == "xxxxxxxxxx … (1000000 characters)"
    assert make_safe("x" * 10, longest=10) == "x" * 10


@given(st.text(st.characters(), max_size=50))
def test_what_comes_out_is_one_line_of_visible_characters(text):
    for character in make_safe(text):
        assert character == " " or unicodedata.category(character)[0] not in "CZ"


@given(st.text(st.characters(), max_size=50))
def test_a_code_span_cannot_be_left(text):
    span = code_span(text)
    assert span == "–" or (span[0] == span[-1] == "`" and not set("`|\n") & set(span[1:-1]))
