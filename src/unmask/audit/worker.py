"""One case at a time: whatever happens in it becomes a finding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unmask.attacks.progress import Progress, silent
from unmask.audit.case import Case
from unmask.audit.channels import STORIES, Desk
from unmask.audit.data import DataSet
from unmask.audit.finding import Finding
from unmask.audit.result import Clock, error_finding


class Worker:
    """Works on cases with one model loaded at a time; the same in this process and in an actor of Ray.

    `threads` is set for the whole process, since the last digits of sums depend on it: equal threads, equal findings.
    """

    def __init__(self, data: Mapping[str, DataSet], device: str, threads: int, progress: Progress = silent) -> None:
        torch.set_num_threads(threads)
        self._desk = Desk(data, device, progress)

    def work(self, case: Case) -> Finding:
        """The finding of a case; an exception is one too, and only an interruption gets through."""
        clock = Clock()
        try:
            finding = STORIES[case["channel"]](case, self._desk)
        except Exception as error:
            finding = error_finding(case, error)
        return clock.stamp(finding, self._desk.device)
