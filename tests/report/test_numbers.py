from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.report.findings import failed, flower_finding, inconclusive, query_finding, text_case, text_finding

from unmask.audit.findings.finding import OpenPoint, Outcome, TextPair
from unmask.report.numbers import (
    control_in_words,
    format_value,
    interval,
    leak_in_full,
    leak_in_words,
    looked_for_in_words,
    number,
    percent,
    scientific,
)


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (1e-6, "< 1 %"), (0.5, "50 %"), (0.9999, "> 99 %"), (1.0, "100 %")]
)
def test_only_all_is_all_and_only_nothing_is_nothing(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-6, "10⁻⁶"),
        (3.4e-7, "3.4·10⁻⁷"),
        (0.25, "0.25"),
        (5300.0, "5300"),
        (5e7, "5·10⁷"),
        (math.inf, "∞"),
    ],
)
def test_numbers_are_short(value, text):
    assert scientific(value) == text


def test_an_epsilon_that_json_could_not_hold_is_infinite():
    assert format_value("epsilon", None) == "∞"
    assert format_value("weight_error", None) == "not a number"
    assert format_value("token_recall", 1) == "100 %"
    assert format_value("exact_texts", 3) == "3"


@pytest.mark.parametrize("value", [None, "1", True, math.nan, math.inf, [1], 10**400])
def test_what_is_no_finite_number_is_none(value):
    assert number({"x": value}, "x") is None


def test_an_inconclusive_attack_never_says_that_nothing_leaked():
    assert leak_in_words(inconclusive(text_case())) == "inconclusive"
    assert leak_in_words(text_finding(text_case(), 0.0)) == "0 % of tokens"
    assert leak_in_words(query_finding(1.0)) == "100 % of weights"
    assert leak_in_words(flower_finding()) == "11 tokens claimed"
    text = TextPair(None, (("secret", "place"),), certain=True)
    assert leak_in_words(flower_finding(texts=(text,) * 3)) == "3 texts and 11 tokens claimed"
    assert leak_in_words(flower_finding(texts=(text,), tokens=())) == "1 text claimed"
    assert leak_in_words(failed(text_case())) == "not measured"


def test_of_a_leak_exact_texts_and_the_hidden_size_are_told_too():
    def sized(**metrics):
        one = query_finding(0.0)
        return replace(one, status="PARTIAL", metrics={**one.metrics, **metrics})

    assert leak_in_full(text_finding(text_case(), 0.5)) == "50 % of tokens, 0 exact"
    assert leak_in_full(text_finding(text_case(), 0.0)) == "0 % of tokens"
    assert leak_in_full(sized(hidden_size_found=1)) == "0 % of weights, hidden size found"
    bound = sized(hidden_size_found=0, hidden_size_share=0.28)
    assert leak_in_full(bound) == "0 % of weights, 28 % of the hidden size as a lower bound"


def test_near_exact_texts_and_alternatives_are_told():
    near = text_finding(text_case(), 0.9, 1)
    open_text = TextPair(None, (("secret", "place"),), ambiguities=(OpenPoint("equal_tokens", "alike"),))
    often = TextPair(None, (("secret", "place"),), ambiguities=(OpenPoint("count", "once or more"),))
    near = replace(near, metrics={**near.metrics, "near_exact_texts": 3}, texts=(open_text, often))
    assert leak_in_full(near) == "90 % of tokens, 1 exact, 3 near-exact, 1 known except for alternatives"


def test_what_was_looked_for_and_the_control_in_words():
    noisy = text_finding(text_case(defences=["int8"]), 0.5)
    assert looked_for_in_words(noisy) == "tokens and whole texts."
    assert "did not test their order" in looked_for_in_words(replace(noisy, looked_for=("tokens",)))
    assert looked_for_in_words(query_finding(1.0)) == "weights."
    assert looked_for_in_words(replace(noisy, looked_for=())) == ""
    assert control_in_words(noisy).endswith("ended as RECOVERED: 100 % of tokens, 4 exact.")
    assert control_in_words(text_finding(text_case(), 1.0)) == ""
    raised = {"id": "x", "case": {}, "status": "ERROR\x1b[2J", "reason": "", "metrics": {}}
    assert control_in_words(replace(noisy, control=raised)).endswith("as ERROR\\x1b[2J: nothing measured.")


def test_what_is_no_leak_stands_beside_its_chance():
    guessed = text_finding(text_case(), 0.18, status="NOTHING_FOUND", chance={"token_recall": 0.2, "rouge2": 0.1})
    assert leak_in_words(guessed) == "18 % of tokens (chance 20 %)"


def test_a_leak_of_no_more_tokens_than_chance_says_why_it_is_one():
    """'25 % of tokens' at a chance of 28 % was called a leak, and nothing said that none of them is false."""
    chance = {"token_recall": 0.28, "token_precision": 0.15, "rouge2": 0.1}
    sure = text_finding(text_case(), 0.25, chance=chance)
    sure = replace(sure, metrics={**sure.metrics, "exact_texts": 0, "rouge2": 0.0, "token_precision": 1.0})
    assert sure.outcome is Outcome.LEAK
    assert leak_in_words(sure) == "25 % of tokens (chance 28 %), but 100 % of those named occur (chance 15 %)"
    more = replace(sure, metrics={**sure.metrics, "token_recall": 0.4})
    assert leak_in_words(more) == "40 % of tokens"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_the_interval_is_student_s(values):
    low, high = interval(values)
    mean = sum(values) / len(values)
    error = stats.sem(values)
    expected = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=error) if error > 1e-12 else (mean, mean)
    assert low == pytest.approx(max(0, expected[0]), abs=1e-6)
    assert high == pytest.approx(min(1, expected[1]), abs=1e-6)


def test_one_seed_has_no_interval():
    assert interval([0.5]) is None
