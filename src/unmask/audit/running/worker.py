"""One case at a time: whatever happens in it becomes a finding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from unmask.attacks.run import Progress, silent
from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet
from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.finding import ERROR, Finding
from unmask.audit.findings.result import Clock, error_finding
from unmask.audit.running.control import Controls, control_case


class Worker:
    """Works on cases with one model loaded at a time; the same in this process and in an actor of Ray.

    `threads` is set for the whole process, since the last digits of sums depend on it: equal threads, equal findings.
    """

    def __init__(self, data: Mapping[str, DataSet], device: str, threads: int, progress: Progress = silent) -> None:
        torch.set_num_threads(threads)
        self._context = WorkerContext(data, device, progress)
        self._controls = Controls(self._attack)

    def work(self, case: Case) -> Finding:
        """The finding of a case, with its control; an exception is one too, only an interruption gets through."""
        clock = Clock()
        finding = self._attack(case)
        if control_case(case) is None:
            self._controls.keep(finding)
        elif finding.status != ERROR:
            finding = replace(finding, control=self._controls.of(case))
        return clock.stamp(finding, self._context.device)

    def _attack(self, case: Case) -> Finding:
        # A bfloat16 product on a CPU without such products turns oneDNN off for good, and so changes the last digits
        # of all cases that follow: each case starts with it on.
        torch.backends.mkldnn.set_flags(True)
        try:
            return CHANNEL_AUDITS[case["channel"]].run(case, self._context)
        except Exception as error:
            return error_finding(case, error)
