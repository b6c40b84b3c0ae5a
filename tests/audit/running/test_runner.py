"""The runner: what is there is skipped, what comes is kept, and other weights under the same name are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.audit.made import make_plan, random_group, save_bert

from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import ERROR, Finding, FindingError
from unmask.audit.findings.folder import MANIFEST, PLAN, FullDiskError, read_audit, read_findings
from unmask.audit.findings.result import late_finding
from unmask.audit.plan import Plan
from unmask.audit.running import runner
from unmask.audit.running.engines import EngineSettings, run_local
from unmask.audit.running.runner import outline, prepare, run_cases
from unmask.errors import InputError


class Engine:
    """Gives findings that say nothing, for as many cases as it is told to; remembers what it was asked."""

    def __init__(self, limit: int = 1000, status: str = "NOTHING_FOUND") -> None:
        self.limit, self.status = limit, status
        self.asked: list[str] = []
        self.closed = False

    def __call__(self, cases: Sequence[Case], means: EngineSettings) -> Iterator[Finding]:
        try:
            for case in cases:
                if len(self.asked) == self.limit:
                    raise KeyboardInterrupt
                self.asked.append(case.id)
                yield Finding(case.id, case.spec, self.status, "")
        finally:
            self.closed = True


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(tmp_path, random_group(range(6)))


def ready(plan: Plan, folder: Path) -> Path:
    prepare(plan, folder, engine="local", threads=1, command="unmask audit")
    return folder


def test_a_folder_is_made_with_manifest_and_plan(plan, tmp_path):
    folder = ready(plan, tmp_path / "deep" / "out")
    assert json.loads((folder / MANIFEST).read_text())["plan"]["sha256"] == plan.sha256
    assert (folder / PLAN).read_text() == plan.text
    assert outline(plan, folder).todo == plan.cases


def test_an_interrupted_run_goes_on(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    first, second = Engine(limit=2), Engine()
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_cases(outline(plan, folder), folder, first, EngineSettings({}), tell=lambda found: told.append(found.id))
    assert first.closed
    assert told == first.asked
    work = outline(plan, folder)
    assert [found.id for found in work.done] == first.asked
    run_cases(work, folder, second, EngineSettings({}))
    assert first.asked + second.asked == [case.id for case in plan.cases]
    assert outline(plan, folder).todo == ()
    assert not read_audit(folder).missing


def test_findings_of_another_plan_are_counted(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, Engine(), EngineSettings({}))
    (tmp_path / "less").mkdir()
    less = make_plan(tmp_path / "less", random_group(range(2)))
    assert outline(plan, folder).num_others == outline(plan, folder, shard=(1, 3)).num_others == 0
    assert outline(less, folder).num_others == 4


def test_nothing_is_told_before_it_is_kept(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")

    def look(found: Finding) -> None:
        assert found.id in read_findings(folder)[0]

    run_cases(outline(plan, folder), folder, Engine(), EngineSettings({}), tell=look)


def test_errors_are_findings_and_run_again_only_when_asked(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, Engine(status=ERROR), EngineSettings({}))
    assert outline(plan, folder).todo == ()
    assert outline(plan, folder, retry_errors=True).todo == plan.cases
    run_cases(outline(plan, folder, retry_errors=True), folder, Engine(), EngineSettings({}))
    assert {found.status for found in read_audit(folder).findings} == {"NOTHING_FOUND"}
    assert outline(plan, folder, retry_errors=True).todo == ()


def test_shards_do_each_other_s_work_once(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    asked = []
    for shard in ((1, 4), (2, 4), (3, 4), (4, 4)):
        engine = Engine()
        run_cases(outline(plan, folder, shard), folder, engine, EngineSettings({}), shard=shard)
        asked += engine.asked
    assert sorted(asked) == sorted(case.id for case in plan.cases)
    assert outline(plan, folder).todo == ()


def test_a_finding_without_a_shard_is_seen_by_shards(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, Engine(), EngineSettings({}))
    assert outline(plan, folder, (1, 2)).todo == ()


def test_a_disk_that_is_full_closes_the_engine(plan, tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    folder, engine = ready(plan, tmp_path / "out"), Engine()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FullDiskError, match="the disk is full"):
        run_cases(outline(plan, folder), folder, engine, EngineSettings({}))
    assert engine.closed
    assert len(engine.asked) == 1
    assert (folder / "findings.jsonl").read_bytes() == b""


def test_a_plan_that_grew_keeps_its_findings(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, Engine(), EngineSettings({}))
    longer = make_plan(tmp_path, random_group(range(8), 'gates = ["no weights"]'))
    ready(longer, folder)
    assert [case["seed"] for case in outline(longer, folder).todo] == [6, 7]
    assert len(read_audit(folder).missing) == 2


# ---- other weights


def model_plan(folder: Path, model: Path) -> Plan:
    return make_plan(folder, f'[[outputs]]\nmodels = ["{model}"]\n')


def test_changed_weights_under_the_same_name_are_refused(tmp_path):
    model = save_bert(tmp_path / "model", seed=0)
    plan = model_plan(tmp_path, model)
    folder = ready(plan, tmp_path / "out")
    before = (folder / MANIFEST).read_text()
    save_bert(model, seed=1)
    with pytest.raises(InputError, match=r"another model\.safetensors; .*another --out") as raised:
        ready(plan, folder)
    assert str(model) in str(raised.value)
    assert (folder / MANIFEST).read_text() == before
    save_bert(model, seed=0)
    ready(plan, folder)


def test_old_findings_do_not_serve_new_weights_though_the_manifest_is_gone(tmp_path):
    """A message advises to delete a damaged manifest; the findings then say themselves whose they are."""
    model = save_bert(tmp_path / "model", seed=0)
    plan = model_plan(tmp_path, model)
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, run_local, EngineSettings(plan.data, "cpu", 1))
    (folder / MANIFEST).unlink()
    save_bert(model, seed=1)
    with pytest.raises(InputError, match=r"made with other weights .*fingerprint .*another --out"):
        ready(plan, folder)
    assert not (folder / MANIFEST).exists()
    save_bert(model, seed=0)
    ready(plan, folder)
    (found,) = read_audit(folder).findings
    assert json.loads((folder / MANIFEST).read_text())["models"][str(model)]["fingerprint"] == found.model_fingerprint


def test_a_model_is_fingerprinted_once(tmp_path, monkeypatch):
    """As long as its files are those of the manifest."""
    plan = model_plan(tmp_path, save_bert(tmp_path / "model"))
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, run_local, EngineSettings(plan.data, "cpu", 1))
    ready(plan, folder)
    monkeypatch.setattr(runner, "fingerprint_model", lambda name: pytest.fail("it was loaded again"))
    ready(plan, folder)


def test_a_folder_with_an_edited_finding_is_refused_before_anything_is_written(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, Engine(), EngineSettings({}))
    findings, before = folder / "findings.jsonl", (folder / MANIFEST).read_bytes()
    findings.write_text(findings.read_text().replace("NOTHING_FOUND", "PARTIAL", 1))
    for refused in (lambda: ready(make_plan(tmp_path, random_group([9])), folder), lambda: outline(plan, folder)):
        with pytest.raises(FindingError, match="was changed after it was written"):
            refused()
    assert (folder / MANIFEST).read_bytes() == before


def test_a_damaged_or_newer_manifest_is_not_overwritten(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    for content, part in (("{", "damaged"), ('{"schema": 7}', "upgrade")):
        (folder / MANIFEST).write_text(content)
        with pytest.raises(InputError, match=part):
            ready(plan, folder)
        assert (folder / MANIFEST).read_text() == content


def test_a_case_that_is_done_is_done_whatever_its_gates(plan, tmp_path):
    folder = ready(plan, tmp_path / "out")
    run_cases(outline(plan, folder), folder, Engine(), EngineSettings({}))
    gated = replace(plan, cases=tuple(replace(case, gates=("no weights",)) for case in plan.cases))
    assert outline(gated, folder).todo == ()


@pytest.mark.parametrize(("limit", "runs_again"), [(1.0, False), (0.5, False), (2.0, True), (None, True)])
def test_cases_that_a_time_limit_ended_run_again_with_more_time(plan, tmp_path, limit, runs_again):
    first, second, *_ = (replace(case, time_limit=1.0) for case in plan.cases)
    late = replace(late_finding(first), run={"time_limit": 1.0})

    def engine(cases: Sequence[Case], means: EngineSettings) -> Iterator[Finding]:
        yield late
        yield Finding(second.id, second.spec, "BUDGET_EXHAUSTED", "queries ended")

    folder = ready(plan, tmp_path / "run")
    run_cases(outline(plan, folder), folder, engine, EngineSettings(plan.data))
    again = replace(plan, cases=tuple(replace(case, time_limit=limit) for case in plan.cases))
    left = {case.id for case in outline(again, folder).todo}
    assert (first.id in left) is runs_again
    assert second.id not in left
