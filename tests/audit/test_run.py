"""An audit from Python: what the command line does, without it."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

import unmask
from unmask.audit.run import run_audit, watch_nothing
from unmask.errors import InputError

PLAN = """
gates = ["no weights"]
[[queries]]
secrets = ["random:heads=1,width=3"]
seeds = [0, 1]
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_it_runs_judges_and_goes_on(plan, tmp_path):
    seen = []

    class Follower:
        def add(self, finding):
            seen.append(finding.id)

        def report(self, stage, done, total):
            pass

    @contextmanager
    def watch(work):
        seen.append(len(work.todo))
        yield Follower()

    out = tmp_path / "out"
    first = run_audit(plan, out, shard=(1, 2), watch=watch)
    assert len(first.missing) == 1
    whole = unmask.run_audit(str(plan), str(out), watch=watch)
    ids = [case.id for case in unmask.load_plan(plan).cases]
    assert seen == [1, ids[0], 1, ids[1]]
    assert whole.exit_code == 1
    assert not whole.missing
    assert {finding.id for finding in unmask.read_audit(out).findings} == set(ids)
    assert unmask.write_reports(out)["html"].is_file()
    assert unmask.read_audit(out).manifest["command"] == "unmask.run_audit"


def test_nobody_needs_to_watch(plan, tmp_path):
    assert run_audit(unmask.load_plan(plan), tmp_path / "out").exit_code == 1


def test_an_engine_that_does_not_exist_is_refused_before_anything_is_written(plan, tmp_path):
    with pytest.raises(InputError, match="slurm"):
        run_audit(plan, tmp_path / "out", engine="slurm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"shard": (9, 8)}, {"device": "cuda:7"}, {"device": "abacus"}], ids=str)
def test_a_refused_call_leaves_the_manifest_as_it_was(plan, tmp_path, monkeypatch, options):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "out"
    run_audit(plan, out)
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(InputError):
        run_audit(plan, out, command="another command", **options)
    assert (out / "manifest.json").read_bytes() == before


def test_the_verdict_is_that_of_the_plan_that_ran(plan, tmp_path):
    """Whatever somebody else writes into the folder meanwhile."""
    out = tmp_path / "out"

    @contextmanager
    def watch(work):
        with watch_nothing(work) as nobody:
            yield nobody
        manifest = json.loads((out / "manifest.json").read_text())
        for case in manifest["cases"]:
            case["gates"] = []
        (out / "manifest.json").write_text(json.dumps(manifest))

    assert run_audit(plan, out, watch=watch).exit_code == 1
