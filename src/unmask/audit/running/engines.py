"""Where cases run. An engine takes cases and gives findings, in any order; `ray_engine.py` is the other one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet
from unmask.audit.findings.finding import Finding
from unmask.audit.running.worker import Worker
from unmask.errors import InputError
from unmask.progress import Progress, silent


@dataclass(frozen=True)
class EngineSettings:
    """What an engine may use.

    `threads` of a worker are the same for every engine, so that findings are too. One is the default: the attacks gain
    little from more, cores that are shared lose much, and findings do not depend on the number of cores.
    """

    data: Mapping[str, DataSet]
    device: str = "auto"
    threads: int = 1
    progress: Progress = silent  # of the attack that is running, where the engine can tell
    workers: int = 1  # processes of the local engine

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if self.workers < 1:
            raise InputError(f"workers is a number of processes, 1 or more, got {self.workers}")


Engine = Callable[[Sequence[Case], EngineSettings], Iterator[Finding]]


def run_local(cases: Sequence[Case], settings: EngineSettings) -> Iterator[Finding]:
    """One case after the other in this process, or in several processes side by side."""
    device = local_device(settings.device)
    if settings.workers > 1 and len(cases) > 1:
        from unmask.audit.running.processes import run_in_processes

        yield from run_in_processes(cases, settings, device)
        return
    worker = Worker(settings.data, device, settings.threads, settings.progress)
    for case in cases:
        yield worker.work(case)


def engine_of(name: str) -> Engine:
    """The engine of a name; Ray is imported only where it is asked for."""
    if name == "local":
        return run_local
    if name == "ray":
        from unmask.audit.running.ray_engine import run_on_ray

        return run_on_ray
    raise InputError(f"engine must be local or ray, got {name!r}")


def local_device(device: str) -> str:
    """The device that is meant by a name; 'auto' is the first GPU, where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {device} was asked for, but torch sees no CUDA device here; use --device cpu")
    return device
