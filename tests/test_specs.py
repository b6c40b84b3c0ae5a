"""The grammar of settings: names, settings, canonical texts, and what is said of mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.specs import Kind, Spec, flag, names, number, one_of, split_text, whole_number

TABLE = {
    "plain": Kind("plain", "nothing to set", dict),
    "full": Kind(
        "full:size=2",
        "one setting of each type",
        dict,
        (
            whole_number("size", 1, 100),
            number("rate", default=None),
            flag("loud", default=False),
            one_of("way", ("up", "down"), default="up"),
            names("parts", "names, joined by +", default=("a",)),
            whole_number("shown", 0, default=3, always_written=True),
        ),
    ),
}


class Thing(Spec):
    """A spec of this table."""

    noun: ClassVar[str] = "thing"
    table: ClassVar[Mapping[str, Kind]] = TABLE


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" plain ", "plain"),
        ("full:size=2", "full:size=2,shown=3"),
        (" full : shown = 3 , size = 2.0 ", "full:size=2,shown=3"),
        ("full:size=2,loud=FALSE,way=up,parts=a", "full:size=2,shown=3"),
        (
            "full:parts=b+c,way=down,loud=true,rate=1e-9,size=1",
            "full:size=1,rate=1e-09,loud=true,way=down,parts=b+c,shown=3",
        ),
    ],
)
def test_texts_that_mean_the_same_are_the_same(text, canonical):
    spec = Thing.parse(text)
    assert str(spec) == canonical
    assert Thing.parse(canonical) == spec
    assert hash(Thing.parse(canonical)) == hash(spec)


def test_settings_are_spelled_out_and_those_given_are_known():
    spec = Thing("full", {"size": "7", "shown": 3})
    assert spec.settings == {"size": 7, "rate": None, "loud": False, "way": "up", "parts": ("a",), "shown": 3}
    assert spec.given == {"size": 7}
    assert Thing("full", {"size": 1, "rate": None}).settings["rate"] is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_come_back_exactly(value):
    assert Thing.parse(str(Thing("full", {"size": 1, "rate": value}))).settings["rate"] == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "there is no thing ''. Known: plain, full; for example plain, full:size=2"),
        ("other:nonsense", "there is no thing 'other'"),
        ("full", "thing 'full' needs 'size'; its settings are size .a whole number from 1 to 100."),
        ("full:", "expected key=value, got ''"),
        ("full:size", "expected key=value, got 'size'.*for example full:size=2"),
        ("full:size=1,", "expected key=value, got ''"),
        ("full:size=1, size = 2", "'size' is given twice, again in 'size = 2'"),
        ("full:size=101", "'size' must be a whole number from 1 to 100, got '101'"),
        ("full:size=²", "'size' must be a whole number"),
        ("full:size=1,way=left", "'way' must be one of up, down, got 'left'"),
        ("full:size=1,loud=1", "'loud' must be true or false, got '1'"),
        ("full:size=1,parts=a++b", "'parts' must be names, joined by"),
        ("full:size=1,rate=nan", "'rate' must be a number, got 'nan'"),
        ("plain:size=1", "thing 'plain' has no setting 'size'. Usage: it has no settings"),
    ],
)
def test_a_mistake_says_what_was_seen_and_what_is_expected(text, part):
    with pytest.raises(InputError, match=part):
        Thing.parse(text)


def test_a_text_of_another_version_is_split_unchecked():
    assert split_text("future:a=1,b") == ("future", ["a=1", "b"])
    assert split_text("plain") == ("plain", [])
