"""Trends: the same cases in every audit, in the order given; what is not known never counts as not leaking."""

from __future__ import annotations

from tests.report.findings import audit_of, failed, inconclusive, text_case, text_finding

from unmask.report.severity import Severity
from unmask.report.trend import trend_of


def audit(*findings):
    return audit_of(list(findings))


def found(recall, exact=0, **changes):
    return text_finding(text_case(**changes), recall, exact)


def test_each_audit_has_a_point_in_the_order_given():
    (line,) = trend_of([audit(found(1.0, 4)), audit(found(0.3)), audit(found(0.0))])
    assert (line.channel, line.model, line.num_cases) == ("gradients", "smollm2-135m", 1)
    assert [point.num_leaks for point in line.points] == [1, 1, 0]
    assert [point.severity for point in line.points] == [Severity.HIGH, Severity.LOW, Severity.NONE]


def test_only_cases_of_all_audits_count():
    both = found(1.0, 4), found(1.0, 4, seed=1)
    (line,) = trend_of([audit(*both), audit(both[0]), audit(*both)])
    assert line.num_cases == 1
    assert trend_of([audit(both[0]), audit(both[1])]) == []


def test_what_is_not_known_is_no_case_that_does_not_leak():
    (line,) = trend_of([audit(found(1.0, 4)), audit(failed(text_case())), audit(inconclusive(text_case()))])
    assert [(point.num_leaks, point.num_unknown) for point in line.points] == [(1, 0), (0, 1), (0, 1)]
    assert line.points[-1].severity is Severity.UNKNOWN


def test_folders_of_models_do_not_matter():
    moved = [found(1.0, 4, model=f"/{place}/models/own") for place in ("here", "there")]
    (line,) = trend_of([audit(one) for one in moved])
    assert line.num_cases == 1


def test_channels_and_models_have_lines_of_their_own():
    cases = found(1.0, 4), found(0.0, model="b"), text_finding(text_case("outputs"), 1.0, 4)
    lines = trend_of([audit(*cases), audit(*cases)])
    assert [(line.channel, line.model) for line in lines] == [
        ("gradients", "b"),
        ("gradients", "smollm2-135m"),
        ("outputs", "smollm2-135m"),
    ]
