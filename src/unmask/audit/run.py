"""An audit from Python: `unmask.run_audit("plan.toml", "runs/audit")`. The command line does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from unmask.audit.findings.finding import Finding
from unmask.audit.findings.folder import audit_of, lock_folder
from unmask.audit.findings.verdict import Verdict, reach_verdict
from unmask.audit.plan import Plan, load_plan
from unmask.audit.running.engines import EngineSettings, engine_of, local_device
from unmask.audit.running.runner import Shard, Work, outline, prepare, run_cases
from unmask.progress import silent


class Watcher(Protocol):
    """Somebody who follows an audit: each finding, and the progress of the attack that runs."""

    def add(self, finding: Finding) -> None:
        """A finding that is on the disk."""

    def report(self, stage: str, done: int, total: int) -> None:
        """How far the attack is."""


class SilentWatcher:
    """Follows nothing."""

    def add(self, finding: Finding) -> None:
        """A finding that is on the disk."""

    report = staticmethod(silent)


@contextmanager
def watch_nothing(work: Work) -> Iterator[Watcher]:
    """An audit that nobody follows."""
    yield SilentWatcher()


def run_audit(
    plan: str | Path | Plan,
    out: str | Path,
    *,
    engine: str = "local",
    shard: Shard | None = None,
    device: str = "auto",
    threads: int = 1,
    workers: int = 1,
    retry_errors: bool = False,
    command: str = "unmask.run_audit",
    watch: Callable[[Work], AbstractContextManager[Watcher]] = watch_nothing,
    busy: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Verdict:
    """Run what a plan asks for and a folder lacks, and judge the whole.

    It can be interrupted at any time and goes on when it is called again. `engine` is 'local', with so many `workers`
    side by side, or 'ray'; `shard` (i, n) runs every n-th case from the i-th on. `command` is what the manifest says
    that was called. `watch` follows the cases, `busy` what comes before them, by its name: large models take a while to
    hash.
    """
    planned = plan if isinstance(plan, Plan) else load_plan(plan)
    run, folder = engine_of(engine), Path(out)
    settings = EngineSettings(planned.data, device, threads, workers=workers)
    if engine == "local":
        local_device(device)  # refused here, before anything is written
    with lock_folder(folder, shard):
        work = outline(planned, folder, shard, retry_errors)
        with busy("hashing the models"):
            manifest = prepare(planned, folder, engine=engine, threads=threads, command=command)
        with watch(work) as watcher:
            run_cases(work, folder, run, replace(settings, progress=watcher.report), shard=shard, tell=watcher.add)
        return reach_verdict(audit_of(manifest, folder))  # of this plan, whatever others write there later
