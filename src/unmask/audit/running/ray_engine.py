"""Cases on a Ray cluster: one actor a model and device keeps its weights loaded; only the driver writes.

A worker that is killed is restarted by Ray, and its case runs again; a case that kills its worker every time becomes
an error. Seeds come from the cases, so it does not matter where one runs.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere; must be said before the import

from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import error_finding
from unmask.audit.running.engines import EngineSettings
from unmask.audit.running.worker import Worker
from unmask.errors import InputError

try:
    import ray
except ImportError:
    raise InputError("--engine ray needs Ray, which is not installed; run: pip install 'unmask[ray]'") from None

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
    """An actor, the model that it holds, and the case that it works on."""

    actor: Any
    model: str
    case: Case


def run_on_ray(cases: Sequence[Case], settings: EngineSettings) -> Iterator[Finding]:
    """As many workers as there is room for, each with one model at a time; who is free takes the longest queue."""
    started_here = _connect()
    try:
        yield from _schedule(cases, settings)
    finally:
        if started_here:
            ray.shutdown()


def _schedule(cases: Sequence[Case], settings: EngineSettings) -> Iterator[Finding]:
    waiting: dict[str, deque[Case]] = {}
    for case in cases:
        waiting.setdefault(case["model"], deque()).append(case)
    options, device, num_slots = _resources(settings)
    running: dict[Any, _Slot] = {}
    while waiting or running:
        while waiting and len(running) < num_slots:
            actor = ray.remote(**options)(_Actor).remote(dict(settings.data), device, settings.threads)
            _submit(actor, _longest(waiting), waiting, running)
        (reference,), _ = ray.wait(list(running), num_returns=1)
        slot = running.pop(reference)
        finding, alive = _result(reference, slot.case)
        if alive and waiting:  # its own model, or another one: a new process would take seconds to start
            _submit(slot.actor, slot.model if slot.model in waiting else _longest(waiting), waiting, running)
        else:
            ray.kill(slot.actor)
        yield finding


def _longest(waiting: Mapping[str, deque[Case]]) -> str:
    """The model with the most cases."""
    return max(waiting, key=lambda name: len(waiting[name]))


def _submit(actor: Any, model: str, waiting: dict[str, deque[Case]], running: dict[Any, _Slot]) -> None:
    """Give an actor the next case of its model."""
    case = waiting[model].popleft()
    if not waiting[model]:
        del waiting[model]
    running[actor.work.remote(case)] = _Slot(actor, model, case)


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
