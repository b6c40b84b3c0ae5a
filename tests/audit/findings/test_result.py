"""From recoveries and exceptions to findings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import ERROR, Outcome
from unmask.audit.findings.result import Clock, error_finding, finding_of
from unmask.errors import InputError
from unmask.recovery import Aim, Certificate, Cost, Recovery, Status, searches_of

CASE = Case({"channel": "gradients", "model": "m", "defences": [], "seed": 0})
SECRET = "The biopsy was positive."


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_recovery_as_a_finding():
    certificate = Certificate("a claim", 1e-7, 1e-3, None, {"gap": math.inf})
    cost, searches = Cost(seconds=3.0, candidates=5), searches_of(Aim.TEXTS, Aim.TOKENS)
    recovery = Recovery(None, Status.PARTIAL, "why", certificate, cost, ("a.weight",), searches)
    found = finding_of(CASE, None, recovery, {"metrics": {"token_recall": 0.5}})
    assert (found.id, found.case, found.status, found.reason) == (CASE.id, CASE.spec, "PARTIAL", "why")
    assert found.certificate["holds"] is True
    assert found.certificate["details"] == {"gap": math.inf}
    assert found.cost == {"candidates": 5, "forward_passes": 0, "queries": 0}  # seconds differ from run to run
    assert found.metrics == {"token_recall": 0.5}
    assert found.used == ("a.weight",)
    assert found.model_fingerprint is None
    assert found.looked_for == ("texts", "tokens")


@pytest.mark.parametrize(
    ("channel", "looked_for", "said"),
    [
        ("gradients", {Aim.TOKENS}, ("tokens",)),
        ("outputs", frozenset(Aim), ("texts", "tokens")),
        ("queries", frozenset(Aim), ("weights",)),
        ("gradients", frozenset(), ()),
    ],
)
def test_what_was_looked_for_of_what_the_channel_has(channel, looked_for, said):
    case = Case({"channel": channel, "seed": 0})
    recovery = Recovery(None, Status.PARTIAL, "", Certificate.none("no"), Cost(), searches=searches_of(*looked_for))
    assert finding_of(case, None, recovery, {}).looked_for == said


def test_who_is_certain_of_what_is_not_there_looked_elsewhere():
    case, searches = Case({"channel": "inputs", "seed": 0}), searches_of(Aim.INPUTS)
    recovery = Recovery(None, Status.RECOVERED, "", Certificate.none("no"), Cost(), searches=searches)
    assert finding_of(case, None, recovery, {"metrics": {"false_inputs": 0}}).looked_for == ("inputs",)
    assert finding_of(case, None, recovery, {"metrics": {"false_inputs": 1}}).looked_for == ()
    shown = replace(recovery, status=Status.NOTHING_FOUND)  # what is shown as a guess claims nothing
    assert finding_of(case, None, shown, {"metrics": {"false_inputs": 1}}).looked_for == ("inputs",)


def test_a_message_of_others_may_quote_the_secret_and_is_no_reason():
    found = error_finding(CASE, raised(KeyError(SECRET)))
    assert found.status == ERROR
    assert found.outcome is Outcome.ERROR
    assert SECRET not in found.reason
    assert found.reason.startswith("KeyError at test_result.py:")
    assert found.error is not None
    assert SECRET in found.error["message"]
    assert SECRET not in found.error["traceback"]


def test_a_message_of_ours_is_the_reason():
    found = error_finding(CASE, raised(InputError("layer must lie in 0…5, got 9")))
    assert found.reason == "InputError: layer must lie in 0…5, got 9"


@pytest.mark.parametrize("error", [OSError("the worker died"), RuntimeError()])
def test_an_error_that_was_never_raised_here_has_no_place(error):
    found = error_finding(CASE, error)
    assert found.reason == f"{type(error).__name__} at an unknown place; findings.jsonl has its message"
    assert found.error is not None
    assert found.error["message"]


def test_the_clock_stamps_what_may_differ():
    before = finding_of(CASE, None, Recovery(None, Status.NOTHING_FOUND, "", Certificate.none("no"), Cost()), {})
    found = Clock().stamp(before, "cpu")
    assert set(found.run) == {"seconds", "started", "host", "device", "unmask", "torch", "threads"}
    assert found.run["seconds"] >= 0
    assert found.run["device"] == "cpu"
