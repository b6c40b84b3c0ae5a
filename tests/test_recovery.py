"""What attacks return: sentences, certificates, and batches of texts."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unmask
from unmask.recovery import Certificate, Cost, RecoveredText, RecoveredTexts, Recovery, Status

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
    assert texts.expanded() == [(1, 2), (3,), (3,), (3,)]


def test_no_texts_expand_to_none():
    assert RecoveredTexts().expanded() == []
    assert RecoveredTexts().token_set == frozenset()


@given(st.lists(st.tuples(st.tuples(st.integers(0, 9)), st.integers(1, 4)), max_size=5))
def test_the_expanded_batch_has_as_many_texts_as_were_counted(pairs):
    texts = RecoveredTexts(tuple(text(tokens, count) for tokens, count in pairs))
    expanded = texts.expanded()
    assert len(expanded) == sum(count for _, count in pairs)
    assert set(expanded) == {tokens for tokens, _ in pairs}


def test_certain_texts_are_told_apart():
    sure, unsure = text((1,)), text((2,), certain=False)
    assert RecoveredTexts((sure, unsure)).certain == (sure,)


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
