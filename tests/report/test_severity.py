"""Severities: what was measured decides, and what is not known is never called 'nothing'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.report.findings import failed, flower_finding, inconclusive, text_case, text_finding

from unmask.audit.findings.finding import TextPair
from unmask.report.severity import Severity, severity_of


def measured(**metrics: float):
    found = text_finding(text_case(), 1.0, 4)
    return replace(found, metrics=metrics, chance={})


@pytest.mark.parametrize(
    ("finding", "severity"),
    [
        (measured(exact_texts=4, near_exact_texts=4, certain_texts=4, token_recall=1.0), Severity.CRITICAL),
        (measured(near_exact_texts=1, certain_texts=1, token_recall=0.2), Severity.CRITICAL),
        (measured(exact_texts=1, certain_texts=0, token_recall=0.2), Severity.HIGH),
        (measured(token_recall=0.5, certain_texts=0), Severity.MEDIUM),
        (measured(token_recall=0.1), Severity.LOW),
        (measured(weights_found=1, weights_rate=1.0), Severity.CRITICAL),
        (replace(measured(weights_found=1, weights_rate=1.0), status="NOTHING_FOUND"), Severity.HIGH),
        (measured(hidden_size_found=1, weights_rate=0.0), Severity.LOW),
        (text_finding(text_case(), 0.0), Severity.NONE),
        (inconclusive(text_case()), Severity.UNKNOWN),
        (failed(text_case()), Severity.UNKNOWN),
    ],
)
def test_what_was_measured_decides(finding, severity):
    assert severity_of(finding) is severity


def test_of_a_live_federation_claims_decide():
    found = flower_finding()
    assert not found.texts
    assert severity_of(found) is Severity.MEDIUM
    guess = TextPair(None, (("a", "no"),))
    assert severity_of(replace(found, texts=(guess,))) is Severity.HIGH
    assert severity_of(replace(found, texts=(guess, replace(guess, certain=True)))) is Severity.CRITICAL


def test_what_is_not_known_is_worse_than_nothing_found_and_not_safe():
    assert Severity.UNKNOWN.rank < Severity.NONE.rank
    assert "Nothing is known" in Severity.UNKNOWN.meaning
    assert [severity.rank for severity in Severity] == list(range(len(Severity)))
    assert all(severity.meaning for severity in Severity)
