"""One case at a time: whatever happens in it becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet
from unmask.audit.channels.channel_audit import WorkerContext
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.finding import ERROR, Finding
from unmask.audit.findings.result import Clock, error_finding, late_finding
from unmask.audit.running.time_limit import TimeLimitError, time_limit
from unmask.progress import Progress, silent, watched_by


class Worker:
    """Works on cases with one model loaded at a time; the same in this process and in an actor of Ray.

    `threads` is set for the whole process, since the last digits of sums depend on it: equal threads, equal findings.
    """

    def __init__(self, data: Mapping[str, DataSet], device: str, threads: int, progress: Progress = silent) -> None:
        torch.set_num_threads(threads)
        self._context, self._progress = WorkerContext(data, device), progress
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
            with time_limit(case.time_limit), watched_by(self._progress):
                return CHANNEL_AUDITS[case["channel"]].run(case, self._context)
        except TimeLimitError:
            self._context.forget_model()  # it was left in the middle of something
            return late_finding(case)
        except Exception as error:
            return error_finding(case, error)


# What each setting is where nothing protects: one client's plain gradient in full precision, no defence.
_UNPROTECTED: Mapping[str, Any] = {"defences": [], "protocol": "fedsgd", "clients": 1, "storage": "float32"}
_COARSE = ("bfloat16",)  # rounding hides as well


def control_case(case: Case) -> Case | None:
    """The case without its protection; None where nothing protects it.

    Model, texts, batch size, task, attack and seed stay. So do site and layer: another place is another attack.
    """
    plain = {**case.spec, **{key: value for key, value in _UNPROTECTED.items() if key in case.spec}}
    if plain.get("dtype") in _COARSE:
        plain["dtype"] = "float32"
    return None if plain == dict(case.spec) else Case(plain, time_limit=case.time_limit)


class Controls:
    """Controls of one worker, each run once, however many cases share it."""

    def __init__(self, run: Callable[[Case], Finding]) -> None:
        self._run = run
        self._known: dict[str, dict[str, Any]] = {}

    def keep(self, finding: Finding) -> None:
        """An unprotected case of the plan, which is the control of its protected ones."""
        self._known[finding.id] = _summary(finding)

    def of(self, case: Case) -> Mapping[str, Any] | None:
        """What the control of a case gave; None where nothing protects it."""
        control = control_case(case)
        if control is None:
            return None
        if control.id not in self._known:
            self.keep(self._run(control))
        return self._known[control.id]


def _summary(finding: Finding) -> dict[str, Any]:
    """What a gate asks of a control. No text is in it, nor the message of a foreign error."""
    document = asdict(finding)
    return {name: document[name] for name in ("id", "case", "status", "reason", "metrics")}
