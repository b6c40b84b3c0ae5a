"""What must hold of the demo, finding by finding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unmask.audit.findings.finding import ERROR, Finding
from unmask.demo import find_broken_claims


def finding(**changes):
    case = {"channel": "gradients", "model": "m", "defences": [], "seed": 0}
    found = Finding("a", case, "RECOVERED", "all of it", {"exact_rate": 1.0, "exact_texts": 1.0})
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (finding(), None),
        (finding(id="control"), "leaks, though its evidence holds no signal"),
        (finding(metrics={"exact_rate": 0.5, "exact_texts": 1.0}), "should leak in full"),
        (finding(status=ERROR, reason="boom"), "ended in an error: boom"),
        (finding(id="control", status="NOT_APPLICABLE", metrics={"exact_texts": 0.0}), None),
        (finding(case={**finding().case, "defences": ["int8"]}, metrics={"exact_rate": 0.0}), None),
        (finding(metrics={"weights_found": 0.0}, status="NOTHING_FOUND"), "should leak in full"),
        (finding(metrics={"weights_found": 4.0}), None),
    ],
)
def test_a_broken_promise_is_seen(found, sentence):
    broken = find_broken_claims([found], {"control"})
    assert len(broken) == (sentence is not None)
    assert sentence is None or sentence in broken[0]


def test_a_mean_of_states_need_not_leak_in_full():
    mean = finding(case={**finding().case, "site": "mean"}, metrics={"exact_rate": 0.0})
    assert not find_broken_claims([mean], ())
    assert find_broken_claims([finding(), mean, finding(metrics={"exact_rate": 0.0})], ()) != []
