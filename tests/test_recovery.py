"""What attacks return: sentences, certificates, and batches of texts."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unmask
from unmask.recovery import (
    Ambiguity,
    AmbiguityKind,
    Certificate,
    Cost,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Status,
)

# Status


@pytest.mark.parametrize("status", Status)
def test_every_status_is_a_sentence(status):
    assert status.value.strip() == status.value
    assert status.value.endswith(".")
    assert status.value[0].isupper()
    assert len(status.value.split()) > 3


def test_no_two_statuses_say_the_same():
    """Members of an enum with equal values would be one member under two names."""
    assert len(Status.__members__) == len(list(Status))


@pytest.mark.parametrize("status", Status)
def test_only_what_was_certified_is_conclusive(status):
    assert status.conclusive == (status in {Status.RECOVERED, Status.PARTIAL})


def test_not_applicable_says_nothing_about_safety():
    assert "nothing about safety" in Status.NOT_APPLICABLE.value


# Certificate


@pytest.mark.parametrize(
    ("residual", "tolerance", "holds"),
    [
        (1e-7, 1e-3, True),
        (1e-3, 1e-3, True),
        (2e-3, 1e-3, False),
        (0.0, 0.0, True),
        (math.inf, 1e-3, False),
        (math.nan, 1e-3, False),
        (1e-7, math.nan, False),
    ],
)
def test_a_certificate_holds_if_its_residual_is_within_its_tolerance(residual, tolerance, holds):
    assert Certificate("every prefix lies in the span", residual, tolerance).holds == holds


def test_a_certificate_of_nothing_never_holds():
    certificate = Certificate.none("the gradients of block 0 are zero")
    assert not certificate.holds
    assert certificate.claim == "the gradients of block 0 are zero"


def test_certificates_do_not_share_their_details():
    first, second = Certificate("a", 0.0, 1.0), Certificate("b", 0.0, 1.0)
    assert first.details == {}
    assert first.details is not second.details


# Texts


def text(tokens: tuple[int, ...], count: int = 1, certain: bool = True) -> RecoveredText:
    return RecoveredText(tokens, " ".join(map(str, tokens)), certain, residual=1e-7, count=count)


def test_texts_are_repeated_as_often_as_they_occur():
    texts = RecoveredTexts((text((1, 2)), text((3,), count=3), text((4, 5), count=0)))
    assert texts.expand() == [(1, 2), (3,), (3,), (3,)]


def test_no_texts_expand_to_none():
    assert RecoveredTexts().expand() == []
    assert RecoveredTexts().token_set == frozenset()


@given(st.lists(st.tuples(st.tuples(st.integers(0, 9)), st.integers(1, 4)), max_size=5))
def test_the_expanded_batch_has_as_many_texts_as_were_counted(pairs):
    texts = RecoveredTexts(tuple(text(tokens, count) for tokens, count in pairs))
    expanded = texts.expand()
    assert len(expanded) == sum(count for _, count in pairs)
    assert set(expanded) == {tokens for tokens, _ in pairs}


def test_certain_texts_are_told_apart():
    sure, unsure = text((1,)), text((2,), certain=False)
    assert RecoveredTexts((sure, unsure)).certain == (sure,)


# What is open about a text


def open_text(tokens: tuple[int, ...], *points: Ambiguity) -> RecoveredText:
    return RecoveredText(tokens, "", certain=False, residual=0.0, ambiguities=points)


RUN = Ambiguity(AmbiguityKind.LEADING_RUN, "the run is open", 0, (4,))
END = Ambiguity(AmbiguityKind.OPEN_END, "it may go on")
COUNT = Ambiguity(AmbiguityKind.COUNT, "it may occur more often")
EQUAL = Ambiguity(AmbiguityKind.EQUAL_TOKENS, "5 or 6", 1, (5, 6))


def test_a_text_covers_itself_and_nothing_else():
    for plain in (text((4, 5)), open_text((4, 5), COUNT)):
        assert plain.covers((4, 5))
        assert plain.covers([4, 5])
        assert not any(plain.covers(other) for other in ((), (4,), (4, 5, 6), (4, 6), (5, 4)))


def test_a_class_of_equal_tokens_covers_all_of_them_at_its_place():
    recovered = open_text((4, 5, 7), EQUAL)
    assert recovered.covers((4, 5, 7))
    assert recovered.covers((4, 6, 7))
    assert not recovered.covers((4, 8, 7))
    assert not recovered.covers((6, 5, 7))


def test_a_leading_run_covers_every_length():
    recovered = open_text((4, 4, 7), RUN)
    assert all(recovered.covers((*(4,) * length, 7)) for length in (1, 2, 5))
    assert not recovered.covers((7,))
    assert not recovered.covers((5, 7))
    assert not recovered.covers((4, 4, 7, 7))
    assert open_text((4,), RUN).covers((4, 4, 4))
    assert not open_text((4, 4, 7), RUN).covers(())


def test_an_open_end_covers_what_goes_on_but_not_what_stops_early():
    recovered = open_text((4, 5), END)
    assert recovered.covers((4, 5))
    assert recovered.covers((4, 5, 6, 7))
    assert not recovered.covers((4,))
    assert not recovered.covers((4, 6, 5))


def test_an_open_beginning_covers_what_stands_before_but_not_what_begins_late():
    recovered = open_text((4, 5), Ambiguity(AmbiguityKind.OPEN_BEGINNING, "and not what comes before"))
    assert recovered.covers((4, 5))
    assert recovered.covers((6, 7, 4, 5))
    assert not recovered.covers((5,))
    assert not recovered.covers((4, 5, 6))


def test_open_points_combine():
    recovered = open_text((4, 4, 7), RUN, END)
    assert recovered.covers((4, 7, 8))
    assert recovered.covers((4, 4, 4, 7))
    assert not recovered.covers((4, 4))
    equal_run = open_text((4, 9), RUN, Ambiguity(AmbiguityKind.EQUAL_TOKENS, "4 or 6", 0, (4, 6)))
    assert equal_run.covers((6, 4, 6, 9))
    assert not equal_run.covers((6, 4, 5, 9))


def test_ambiguities_are_part_of_what_is_compared():
    assert open_text((4, 5), END) != open_text((4, 5))
    assert {RUN, END, COUNT, EQUAL} == {EQUAL, COUNT, END, RUN}


# All of them


def test_a_text_counts_once_unless_said_otherwise():
    assert RecoveredText((1,), "1", certain=True, residual=0.0).count == 1


def test_nothing_was_spent_unless_said_otherwise():
    assert dataclasses.astuple(Cost()) == (0.0, 0, 0, 0)


@pytest.mark.parametrize(
    "result",
    [
        Certificate("claim", 0.0, 1.0),
        Cost(),
        RecoveredTexts(),
        text((1,)),
        Recovery(None, Status.NOTHING_FOUND, "reason", Certificate.none("why"), Cost()),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_are_frozen(result):
    field = dataclasses.fields(result)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(result, field, None)


def test_the_public_names_are_these():
    assert unmask.Status is Status
    assert unmask.Recovery is Recovery
    assert unmask.RecoveredTexts is RecoveredTexts
