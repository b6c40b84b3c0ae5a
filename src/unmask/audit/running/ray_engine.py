"""Cases on a Ray cluster: one actor a model and device keeps its weights loaded; only the driver writes.

A worker that is killed is restarted by Ray, and its case runs again; a case that kills its worker every time becomes
an error. Seeds come from the cases, so it does not matter where one runs.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere; must be said before the import

from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import error_finding
from unmask.audit.running.engines import EngineSettings
from unmask.audit.running.families import Families, families_of, take_family
from unmask.audit.running.worker import Worker
from unmask.errors import InputError

try:
    import ray
except ImportError:
    raise InputError("--engine ray needs Ray, which is not installed; run: pip install 'unmask[ray]'") from None

_AHEAD = 2  # cases that a worker is given: the one that it runs, and the next
_RETRIES = 3  # of a case whose worker died
_OBJECT_STORE_BYTES = 256 * 2**20  # cases and findings are small


class _Actor:
    """A worker in a process of its own."""

    def __init__(self, data: Mapping[str, DataSet], device: str, threads: int) -> None:
        self._worker = Worker(data, device, threads)

    def work(self, case: Case) -> Finding:
        """The finding of a case."""
        return self._worker.work(case)


@dataclass
class _Slot:
    """An actor, the model that it holds, the rest of its family, and what it was given, in the order that it runs."""

    actor: Any
    model: str = ""
    family: deque[Case] = field(default_factory=deque)
    given: dict[Any, Case] = field(default_factory=dict)  # by what Ray hands out for each

    def fill(self, waiting: dict[str, Families]) -> None:
        """Give it the case that it runs and the next one, where there are any left."""
        while len(self.given) < _AHEAD and (self.family or waiting):
            if not self.family:
                self.model, self.family = take_family(waiting, self.model)
            case = self.family.popleft()
            self.given[self.actor.work.remote(case)] = case

    def give_up(self, waiting: dict[str, Families]) -> None:
        """Put back what it has not begun."""
        for case in (*self.given.values(), *self.family):
            waiting.setdefault(case["model"], deque()).append(deque([case]))
        self.given.clear()


def run_on_ray(cases: Sequence[Case], settings: EngineSettings) -> Iterator[Finding]:
    """As many workers as there is room for, each with one model at a time; who is free takes the longest queue."""
    started_here = _connect()
    try:
        yield from _schedule(cases, settings)
    finally:
        if started_here:
            ray.shutdown()


def _schedule(cases: Sequence[Case], settings: EngineSettings) -> Iterator[Finding]:
    """Workers have a case and the next one, so that none waits while the driver writes a finding."""
    options, device, num_slots = _resources(settings)
    waiting = families_of(cases, num_slots)
    slots: list[_Slot] = []
    while waiting or slots:
        while waiting and len(slots) < num_slots:
            actor = ray.remote(**options)(_Actor).remote(dict(settings.data), device, settings.threads)
            slots.append(_Slot(actor))
            slots[-1].fill(waiting)
        ready, _ = ray.wait([each for slot in slots for each in slot.given], num_returns=1)
        slot = next(slot for slot in slots if ready[0] in slot.given)
        first = next(iter(slot.given))  # a worker runs its cases in order: if it died, then of this one
        finding, alive = _result(first, slot.given.pop(first))
        if alive:
            slot.fill(waiting)
        else:
            slot.give_up(waiting)
        if not slot.given:
            ray.kill(slot.actor)
            slots.remove(slot)
        yield finding


def _result(reference: Any, case: Case) -> tuple[Finding, bool]:
    """The finding, and whether the actor can be used again."""
    try:
        return ray.get(reference), True
    except ray.exceptions.RayError as error:
        return error_finding(case, error), False


def _connect() -> bool:
    """Join the cluster that `RAY_ADDRESS` or `ray start` names, else start one here; whether one was started."""
    if ray.is_initialized():
        return False
    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    try:
        ray.init(object_store_memory=_OBJECT_STORE_BYTES, **options)
    except ValueError:  # a cluster is there, and its store has its size already
        ray.init(**options)
    return True


def _resources(settings: EngineSettings) -> tuple[dict[str, Any], str, int]:
    """What an actor takes, the device that it uses, and how many there is room for."""
    total = ray.cluster_resources()
    num_gpus = int(total.get("GPU", 0))
    use_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and num_gpus > 0)
    if use_gpu and not num_gpus:
        raise InputError(
            f"--device {settings.device} was asked for, but Ray sees no GPU in its cluster; use --device cpu"
        )
    retries = {"max_restarts": _RETRIES, "max_task_retries": _RETRIES}
    by_cpu = max(1, int(total.get("CPU", 1)) // settings.threads)
    if use_gpu:
        return {"num_gpus": 1, "num_cpus": 1, **retries}, "cuda", num_gpus
    return {"num_cpus": min(settings.threads, int(total.get("CPU", 1))), **retries}, "cpu", by_cpu
