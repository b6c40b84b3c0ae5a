"""Cases in processes side by side: the findings of one process, and one that is killed costs its case only."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from itertools import islice

import pytest
from tests.audit.made import make_plan, random_group

from unmask.audit.findings.finding import ERROR, Outcome
from unmask.audit.running.engines import EngineSettings, run_local
from unmask.errors import InputError


def test_findings_are_those_of_one_process_and_a_killed_one_costs_its_case(tmp_path, one_thread):
    plan, told = make_plan(tmp_path, random_group(seeds=range(4))), []
    alone = {found.id: found for found in run_local(plan.cases, EngineSettings(plan.data, "cpu", 1))}
    settings = EngineSettings(plan.data, "cpu", 1, lambda *step: told.append(step), workers=2)
    findings = run_local(plan.cases, settings)
    found = [next(findings)]
    multiprocessing.active_children()[0].kill()
    found += islice(findings, len(alone) - 2)
    assert multiprocessing.active_children()
    findings.close()
    assert not multiprocessing.active_children()  # they end with whoever asked for them
    lost = [one for one in found if one.outcome is Outcome.ERROR]
    assert [one.status for one in lost] == [ERROR]
    assert "exit code -9" in lost[0].reason
    for one in found:
        if one not in lost:
            assert replace(one, run={}).to_json() == replace(alone[one.id], run={}).to_json()
    assert told


def test_no_process_is_no_engine():
    with pytest.raises(InputError, match="1 or more, got 0"):
        EngineSettings({}, workers=0)
