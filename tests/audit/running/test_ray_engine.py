"""Cases on Ray: the findings of the local engine, bit for bit, whoever is killed on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.audit.made import make_plan, random_group, save_bert, spec

from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import ERROR, Finding, Outcome
from unmask.audit.findings.folder import read_audit
from unmask.audit.findings.verdict import reach_verdict
from unmask.audit.plan import Plan
from unmask.audit.running.engines import EngineSettings, run_local
from unmask.audit.running.runner import outline, prepare, run_cases
from unmask.errors import InputError

ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'unmask[ray]'")
psutil = pytest.importorskip("psutil", reason="psutil is missing: pip install psutil")
ray_engine = pytest.importorskip("unmask.audit.running.ray_engine")

CROSSED = 1
BIN = Path(sys.executable).parent
PATIENCE = 120  # seconds that a process of Ray may take to start or to go, on busy cores


# ---- without a cluster


def resources(monkeypatch: pytest.MonkeyPatch, device: str, threads: int, **total: float) -> tuple[Any, str, int]:
    monkeypatch.setattr(ray, "cluster_resources", lambda: total)
    return ray_engine._resources(EngineSettings({}, device, threads))


def test_one_worker_for_so_many_cores(monkeypatch):
    for cores, threads, num_slots in ((8, 2, 4), (8, 3, 2), (2, 2, 1), (1, 4, 1)):
        options, device, slots = resources(monkeypatch, "auto", threads, CPU=cores)
        assert (device, slots) == ("cpu", num_slots)
        assert options["num_cpus"] == min(threads, cores)
        assert "num_gpus" not in options


def test_one_worker_a_gpu_where_ray_sees_some(monkeypatch):
    options, device, slots = resources(monkeypatch, "auto", 2, CPU=8, GPU=3)
    assert (device, slots, options["num_gpus"]) == ("cuda", 3, 1)
    _, device, slots = resources(monkeypatch, "cpu", 2, CPU=8, GPU=3)
    assert (device, slots) == ("cpu", 4)
    with pytest.raises(InputError, match="Ray sees no GPU"):
        resources(monkeypatch, "cuda", 2, CPU=8)


def test_a_worker_that_died_for_good_is_an_error_of_its_case(monkeypatch):
    def dead(reference: object) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", dead)
    found, alive = ray_engine._result(object(), Case(spec()))
    assert not alive
    assert found.status == ERROR
    assert found.id == Case(spec()).id
    assert "RayActorError" in found.reason


def cases_of(num_seeds: int, defences: list[list[str]]) -> list[Case]:
    return [Case(spec(seed=seed, defences=defence)) for defence in defences for seed in range(num_seeds)]


def test_cases_with_one_control_go_to_one_worker():
    """Each worker that meets a protected case runs its control, so that a plan on n workers would run it n times."""
    cases = cases_of(4, [[], ["noise:sigma=1e-3"], ["clip:norm=1"]])
    (families,) = ray_engine.families_of(cases, 2).values()
    assert [len(family) for family in families] == [3, 3, 3, 3]
    assert all(len({case["seed"] for case in family}) == 1 for family in families)
    (split,) = ray_engine.families_of(cases[:1] + cases[4:5], 2).values()  # one family for two workers
    assert [len(family) for family in split] == [1, 1]


class Recorder:
    """An actor that keeps what it is given."""

    def __init__(self) -> None:
        self.work, self.given = self, []

    def remote(self, case: Case) -> object:
        self.given.append(case)
        return object()


def test_a_worker_has_the_next_case_before_it_is_done_and_a_dead_one_gives_it_back():
    cases = cases_of(3, [[], ["clip:norm=1"]])
    waiting = ray_engine.families_of(cases, 1)
    slot = ray_engine._Slot(Recorder())
    slot.fill(waiting)
    assert [case["seed"] for case in slot.actor.given] == [0, 0]
    slot.given.pop(next(iter(slot.given)))
    slot.fill(waiting)
    assert [case["seed"] for case in slot.actor.given] == [0, 0, 1]
    slot.give_up(waiting)
    left = [case for families in waiting.values() for family in families for case in family]
    assert not slot.given
    assert {case.id for case in left} == {case.id for case in cases} - {slot.actor.given[0].id}


def test_a_cluster_that_is_there_is_joined(monkeypatch):
    """Ray refuses to size the store of a cluster that somebody else started."""
    calls = []

    def init(**options: Any) -> None:
        calls.append(options)
        if "object_store_memory" in options:
            raise ValueError("When connecting to an existing cluster, object_store_memory must not be provided.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert ray_engine._connect()
    assert "object_store_memory" not in calls[-1]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert not ray_engine._connect()


# ---- clusters of their own


@pytest.fixture(scope="module", autouse=True)
def ray_folder() -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths must be short, so that nobody else's cluster is seen or met."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """24 cases of two queues: heads without a model, and a small model."""
    folder = tmp_path_factory.mktemp("plan")
    model = save_bert(tmp_path_factory.mktemp("model"))
    gradients = f'[[gradients]]\nmodels = ["{model}"]\ndata = ["notes"]\nbatch_sizes = [2]\nseeds = [0, 1, 2, 3]\n'
    gradients += 'defences = ["none", "noise:sigma=1e-3"]\n'
    service = random_group(range(16)).replace("heads=1,width=4", "heads=2,width=8")
    return make_plan(folder, service, gradients, top='gates = ["no exact text", "no weights"]')


@pytest.fixture(scope="module")
def whole(plan: Plan, one_thread: None) -> dict[str, str]:
    """What the local engine finds."""
    return plain(run_local(plan.cases, EngineSettings(plan.data, "cpu", 1)))


def plain(findings: Any) -> dict[str, str]:
    """Findings by id, without what may differ between runs."""
    return {found.id: replace(found, run={}).to_json() for found in findings}


def family_of(process: int) -> list[Any]:
    """Every process that descends from this one, now."""
    try:
        return list(psutil.Process(process).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def actors_of(process: int, doing: str = "ray::_Actor") -> list[Any]:
    """Workers among them."""
    return [child for child in family_of(process) if _title(child).startswith(doing)]


def _title(process: Any) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def end(processes: list[Any]) -> None:
    """Ray's own agents outlive a cluster that was killed by minutes; these are ours."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def start(plan: Plan, out: Path) -> subprocess.Popen[str]:
    """`unmask audit --engine ray` in a process of its own, which starts a cluster of its own."""
    command = [BIN / "unmask", "audit", plan.path, "--out", out, "--threads", 1, "--engine", "ray"]
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_lines(out: Path, number: int, process: subprocess.Popen[str]) -> None:
    path = out / "findings.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def ids_of(out: Path) -> list[str]:
    return [Finding.from_json(line).id for line in (out / "findings.jsonl").read_text().splitlines()]


class Killer:
    """Kills the first worker that is seen at work."""

    def __init__(self, head: int) -> None:
        self.head, self.victim = head, None

    def __call__(self, found: Finding) -> None:
        """Called at each finding, when the other workers are at work."""
        if self.victim is None and (working := actors_of(self.head, "ray::_Actor.work")):
            self.victim = working[0]
            os.kill(working[0].pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_driver_and_a_killed_worker_lose_and_repeat_nothing(plan, whole, tmp_path):
    out = tmp_path / "out"
    process, family = start(plan, out), []
    try:
        wait_for_lines(out, 3, process)
        family, actors = family_of(process.pid), actors_of(process.pid)
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert not psutil.wait_procs(actors, timeout=PATIENCE)[1]  # nobody goes on working for a dead driver
    finally:
        end([*family_of(process.pid), *family])
        process.kill()
        process.communicate()
    kept = ids_of(out)
    assert 3 <= len(kept) < 24

    killer = Killer(os.getpid())
    prepare(plan, out, engine="ray", threads=1, command="unmask audit")
    work = outline(plan, out)
    assert len(work.todo) == 24 - len(kept)
    run_cases(work, out, ray_engine.run_on_ray, EngineSettings(plan.data, "cpu", 1), tell=killer)
    assert killer.victim is not None
    assert not ray.is_initialized()

    ids = ids_of(out)
    assert len(ids) == len(set(ids)) == 24
    assert ids[: len(kept)] == kept
    found = read_audit(out)
    assert found.num_damaged == 0
    assert {one.outcome for one in found.findings} == {Outcome.LEAK}
    assert plain(found.findings) == whole  # bit for bit those of the local engine, the killed worker's case included
    assert reach_verdict(found).exit_code == CROSSED


@pytest.fixture
def cluster(ray_folder: Path) -> Iterator[int]:
    """A cluster that was started with `ray start`, as on a machine that has one; its first process."""
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus", "2", "--port", "0", "--disable-usage-stats"]
    command += ["--include-dashboard", "false", "--object-store-memory", str(10**8)]
    head = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (ray_folder / "ray" / "ray_current_cluster").exists():
        assert head.poll() is None
        time.sleep(0.1)
    yield head.pid
    family = family_of(head.pid)
    head.terminate()
    head.wait(PATIENCE)
    end(family)
    (ray_folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_worker_that_dies_every_time_is_an_error_and_the_rest_goes_on(plan, whole, cluster, monkeypatch):
    """On a cluster that is there already; with no retries, one death is every time."""
    monkeypatch.setattr(ray_engine, "_RETRIES", 0)
    killer, findings = Killer(cluster), []
    for found in ray_engine.run_on_ray(plan.cases, EngineSettings(plan.data, "cpu", 1)):
        findings.append(found)
        killer(found)
    assert killer.victim is not None
    assert not ray.is_initialized()
    assert [found.id for found in findings if found.status == ERROR]
    (lost,) = (found for found in findings if found.status == ERROR)
    assert "Actor" in lost.reason
    assert {found.id for found in findings} == set(whole)
    assert len(findings) == 24
    assert plain(found for found in findings if found is not lost).items() < whole.items()


@pytest.mark.slow
def test_ctrl_c_ends_the_cluster_too(plan, tmp_path):
    out = tmp_path / "out"
    process, family = start(plan, out), []
    try:
        wait_for_lines(out, 2, process)
        family, actors = family_of(process.pid), actors_of(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert "stopped; everything written so far is kept" in " ".join(err.split())
        assert not psutil.wait_procs(actors, timeout=PATIENCE)[1]
    finally:
        end([*family_of(process.pid), *family])
        process.kill()
    assert 2 <= len(set(ids_of(out))) == len(ids_of(out)) < 24
