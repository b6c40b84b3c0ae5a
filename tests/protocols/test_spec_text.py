"""Settings as text: names, settings, and what is said of mistakes."""

from __future__ import annotations

import pytest

from unmask.errors import InputError
from unmask.protocols.spec_text import read_spec


def read(text: str) -> tuple[str, dict[str, str]]:
    return read_spec("thing", text, lambda name: f"use {name} so")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ("a", {})),
        (" a ", ("a", {})),
        ("a:b=1", ("a", {"b": "1"})),
        (" a : b = 1 , c = x=y ", ("a", {"b": "1", "c": "x=y"})),
        ("a:url=http://x", ("a", {"url": "http://x"})),
        ("a:b=", ("a", {"b": ""})),
        ("", ("", {})),
    ],
)
def test_names_and_settings(text, expected):
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a:", "expected key=value, got ''"),
        ("a:b", "expected key=value, got 'b'"),
        ("a:b=1,", "expected key=value, got ''"),
        ("a:b=1, b = 2", "'b' is given twice, again in 'b = 2'"),
    ],
)
def test_mistakes_name_the_part_and_the_usage(text, part):
    with pytest.raises(InputError, match=f"thing 'a': .*{part}.*use a so"):
        read(text)


def test_an_unknown_name_comes_before_its_settings():
    def usage(name: str) -> str:
        raise InputError(f"there is no thing '{name}'")

    with pytest.raises(InputError, match="no thing 'a'"):
        read_spec("thing", "a:nonsense", usage)
