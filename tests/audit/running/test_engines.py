"""The local engine: cases in order, one after the other, on the device that was meant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.audit.made import make_plan, random_group

from unmask.audit.findings.finding import Outcome
from unmask.audit.running.engines import EngineSettings, engine_of, local_device, run_local
from unmask.errors import InputError


@pytest.fixture(autouse=True)
def same_threads(one_thread: None) -> None:
    """The engine sets the threads of the process."""


def test_cases_run_in_order_and_give_the_same_again(tmp_path):
    plan = make_plan(tmp_path, random_group())
    first, second = (list(run_local(plan.cases, EngineSettings(plan.data, "cpu", 1))) for _ in range(2))
    assert [found.id for found in first] == [case.id for case in plan.cases]
    assert {found.outcome for found in first} == {Outcome.LEAK}
    for one, other in zip(first, second, strict=True):
        assert replace(one, run={}).to_json() == replace(other, run={}).to_json()


def test_a_case_runs_when_it_is_asked_for(tmp_path):
    """So that each finding can be kept before the next case starts."""
    stages = []
    plan = make_plan(tmp_path, random_group())
    findings = run_local(plan.cases, EngineSettings(plan.data, "cpu", 1, lambda *stage: stages.append(stage)))
    assert not stages
    next(findings)
    seen = len(stages)
    assert seen > 0
    next(findings)
    assert len(stages) > seen


def test_findings_do_not_depend_on_the_number_of_cores():
    assert EngineSettings({}).threads == 1


def test_engines_by_name():
    assert engine_of("local") is run_local
    with pytest.raises(InputError, match="local or ray, got 'slurm'"):
        engine_of("slurm")


def test_devices():
    assert local_device("cpu") == "cpu"
    assert local_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    for device in ("abacus", "meta", "cuda:x"):
        with pytest.raises(InputError, match=f"got '{device}'"):
            EngineSettings({}, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, so asking for one is no mistake")
def test_a_device_that_is_not_here():
    with pytest.raises(InputError, match="use --device cpu"):
        local_device("cuda:1")
