"""One case at a time: whatever happens in it becomes a finding."""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unmask import __version__
from unmask.attacks.progress import Progress, silent
from unmask.audit.case import Case
from unmask.audit.channels import STORIES, Desk
from unmask.audit.data import DataSet
from unmask.audit.finding import ERROR, Finding


class Worker:
    """Works on cases with one model loaded at a time; the same in this process and in an actor of Ray.

    `threads` is set for the whole process, since the last digits of sums depend on it: equal threads, equal findings.
    """

    def __init__(self, data: Mapping[str, DataSet], device: str, threads: int, progress: Progress = silent) -> None:
        torch.set_num_threads(threads)
        self._desk = Desk(data, device, progress)
        self._device = device

    def work(self, case: Case) -> Finding:
        """The finding of a case; an exception is one too, and only an interruption gets through."""
        started, clock = datetime.now(UTC), time.perf_counter()
        try:
            finding = STORIES[case["channel"]](case, self._desk)
        except Exception as error:
            finding = error_finding(case, error)
        run = {
            "seconds": round(time.perf_counter() - clock, 3),
            "started": started.isoformat(timespec="seconds"),
            "host": platform.node(),
            "device": self._device,
            "unmask": __version__,
        }
        return replace(finding, run=run)


def error_finding(case: Case, error: BaseException) -> Finding:
    """A case that raised: what, and where in the code; no values, which might be the secret."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
    message = str(error) or type(error).__name__
    document: dict[str, Any] = {"type": type(error).__name__, "message": message, "traceback": "\n".join(where)}
    return Finding(case.id, case.spec, ERROR, f"{type(error).__name__}: {message}", error=document)
