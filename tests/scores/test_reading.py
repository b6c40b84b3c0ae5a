"""Texts as people read them: the same text in other clothes, and all but a few characters of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.scores.reading import count_allowed_edits, edit_distance, is_near_exact, normalise_text

quick = settings(max_examples=80)
short = st.text("abc", max_size=8)


def slow_distance(first: str, second: str) -> int:
    """The recursion, written out."""
    if not first or not second:
        return len(first) + len(second)
    substituted = slow_distance(first[1:], second[1:]) + (first[0] != second[0])
    if first[0] == second[0]:
        return substituted
    return min(substituted, slow_distance(first[1:], second) + 1, slow_distance(first, second[1:]) + 1)


@quick
@given(short.filter(lambda text: len(text) < 6), short.filter(lambda text: len(text) < 6))
def test_the_distance_is_that_of_the_recursion(first, second):
    assert edit_distance(first, second, 99) == slow_distance(first, second)


@quick
@given(short, short, st.integers(0, 4))
def test_beyond_the_limit_it_only_says_so(first, second, limit):
    assert edit_distance(first, second, limit) == min(edit_distance(first, second, 99), limit + 1)


@pytest.mark.parametrize(
    ("seen", "true", "ignore_case"),
    [
        ("a cat", " a  cat\n", False),
        ("caf\u00e9", "cafe\u0301", False),
        ("The Cat", "the cat", True),
        ("a\u00a0cat", "a cat", False),
    ],
)
def test_what_a_reader_does_not_see_does_not_count(seen, true, ignore_case):
    assert normalise_text(seen, ignore_case) == normalise_text(true, ignore_case)


def test_what_a_reader_sees_does():
    assert normalise_text("The Cat") != normalise_text("the cat")
    assert normalise_text("the rapist") != normalise_text("therapist")


@pytest.mark.parametrize(
    ("length", "allowed"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (40, 2), (60, 3), (100, 5), (400, 20)]
)
def test_how_many_characters_may_differ(length, allowed):
    assert count_allowed_edits(length) == allowed


@pytest.mark.parametrize(
    ("recovered", "is_near"),
    [
        ("Her salary is 96,000 a year.", True),
        ("Her salary is 96,000 a year", True),  # the final full stop, as from a client in bfloat16
        ("er salary is 96,000 a year", True),
        ("Her salary is 96,000", False),
        ("The spare key is under the mat.", False),
        ("", False),
    ],
)
def test_all_but_a_few_characters(recovered, is_near):
    assert is_near_exact(recovered, "Her salary is 96,000 a year.") is is_near


def test_nothing_is_not_nearly_a_short_text():
    assert not is_near_exact("", "Hi")
    assert not is_near_exact("no", "yes")
    assert is_near_exact("1235", "1234")
