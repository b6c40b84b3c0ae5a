"""A worker: whatever a case does becomes a finding, except an interruption; what is told of errors is no secret."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import torch
from tests.audit.made import spec

from unmask.audit.cases.case import Case
from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.gradients import GRADIENTS
from unmask.audit.findings.finding import ERROR, Finding, Outcome
from unmask.audit.findings.result import error_finding
from unmask.audit.running import worker as module
from unmask.audit.running.worker import Worker, control_case

SECRET = "Maria Keller was admitted with chest pain"
CASE = Case(spec())


@pytest.fixture
def worker() -> Worker:
    return Worker({}, "cpu", torch.get_num_threads())


def stories(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> None:
    def story(case: Case, context: WorkerContext) -> Finding:
        text = SECRET  # a value of this frame, as any attack's frames have some
        assert text
        raise raised

    monkeypatch.setattr(module, "CHANNEL_AUDITS", {"gradients": replace(GRADIENTS, run=story)})


@pytest.mark.parametrize(
    "raised", [ValueError("bad"), RuntimeError(""), MemoryError(), RecursionError(), AssertionError()]
)
def test_an_exception_becomes_a_finding(worker, monkeypatch, raised):
    stories(monkeypatch, raised)
    found = worker.work(CASE)
    assert found.status == ERROR
    assert found.outcome is Outcome.ERROR
    assert (found.id, found.case) == (CASE.id, CASE.spec)
    assert found.error is not None
    assert found.error["type"] == type(raised).__name__
    assert found.reason.startswith(type(raised).__name__)
    assert found.error["message"]
    assert Finding.from_json(found.to_json()) == found


def test_every_case_starts_with_the_same_arithmetic(worker, monkeypatch):
    seen = []

    def story(case: Case, context: WorkerContext) -> Finding:
        seen.append(torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.set_flags(False)  # as torch does after a bfloat16 product that the CPU lacks
        raise ValueError

    monkeypatch.setattr(module, "CHANNEL_AUDITS", {"gradients": replace(GRADIENTS, run=story)})
    worker.work(CASE)
    worker.work(CASE)
    torch.backends.mkldnn.set_flags(True)
    assert seen == [True, True]


def test_the_traceback_has_places_and_no_values(worker, monkeypatch):
    stories(monkeypatch, ValueError("bad"))
    found = worker.work(CASE)
    assert found.error is not None
    lines = found.error["traceback"].splitlines()
    assert lines[-1].startswith("test_worker.py:")
    assert lines[-1].endswith(" in story")
    assert SECRET not in found.to_json()
    assert "Maria" not in found.to_json()
    assert "/" not in found.error["traceback"]  # nor where somebody's home is


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interruption_gets_through(worker, monkeypatch, raised):
    stories(monkeypatch, raised)
    with pytest.raises(type(raised)):
        worker.work(CASE)


def test_the_next_case_runs_after_an_error(worker, monkeypatch):
    stories(monkeypatch, ValueError("bad"))
    worker.work(CASE)
    monkeypatch.undo()
    service = {"channel": "queries", "model": "", "secret": "random:heads=1,width=4", "defences": [], "seed": 0}
    assert worker.work(Case({**service, "attack": "default"})).outcome is Outcome.LEAK


def test_an_unknown_channel_is_an_error_too(worker):
    assert worker.work(Case(spec(channel="smoke"))).status == ERROR


def test_what_a_run_was(worker):
    found = worker.work(Case(spec(channel="smoke")))
    assert set(found.run) == {"seconds", "started", "host", "device", "unmask", "torch", "threads"}
    assert found.run["seconds"] >= 0
    assert datetime.fromisoformat(found.run["started"]).tzinfo is not None


def test_threads_are_set_for_the_whole_process():
    before = torch.get_num_threads()
    try:
        Worker({}, "cpu", 1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_an_error_that_was_never_raised():
    """As of a worker that died: there is no traceback."""
    found: Any = error_finding(CASE, OSError("the worker died"))
    assert found.error["traceback"] == ""
    assert found.reason.startswith("OSError at an unknown place")


def test_a_case_that_takes_too_long_is_inconclusive_and_its_model_is_loaded_again(worker, monkeypatch):
    forgotten = []

    def story(case: Case, context: WorkerContext) -> Finding:
        time.sleep(30)
        raise AssertionError

    monkeypatch.setattr(module, "CHANNEL_AUDITS", {"gradients": replace(GRADIENTS, run=story)})
    monkeypatch.setattr(WorkerContext, "forget_model", lambda self: forgotten.append(True))
    found = worker.work(replace(CASE, time_limit=0.05))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "time limit of 0.05 s" in found.reason
    assert found.run["time_limit"] == 0.05
    assert forgotten
    assert Finding.from_json(found.to_json()) == found


def test_controls_have_the_time_of_their_case():
    control = control_case(Case(spec(defences=["int8"]), time_limit=7.0))
    assert control is not None
    assert control.time_limit == 7.0
