"""Where cases run. An engine takes cases and gives findings, in any order; `ray_engine.py` is the other one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from unmask.attacks.progress import Progress, silent
from unmask.audit.case import Case
from unmask.audit.data import DataSet
from unmask.audit.finding import Finding
from unmask.audit.worker import Worker
from unmask.errors import InputError

_MOST_THREADS = 4  # of one worker: the attacks gain little from more, and other workers want theirs


@dataclass(frozen=True)
class Means:
    """What an engine may use. `threads` a worker is the same for every engine, so that findings are too."""

    data: Mapping[str, DataSet]
    device: str = "auto"
    threads: int = 0  # 0: as many as there are cores, at most four
    progress: Progress = silent  # of the attack that is running, where the engine can tell

    @property
    def threads_each(self) -> int:
        """Threads of one worker."""
        return self.threads or min(_MOST_THREADS, os.cpu_count() or 1)


Engine = Callable[[Sequence[Case], Means], Iterator[Finding]]


def run_local(cases: Sequence[Case], means: Means) -> Iterator[Finding]:
    """One case after the other in this process."""
    worker = Worker(means.data, local_device(means.device), means.threads_each, means.progress)
    for case in cases:
        yield worker.work(case)


def local_device(device: str) -> str:
    """The device that is meant by a name; 'auto' is the first GPU, where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(device)
    except RuntimeError:
        raise InputError(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {device} was asked for, but torch sees no CUDA device here; use --device cpu")
    return device
