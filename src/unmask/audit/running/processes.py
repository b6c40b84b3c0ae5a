"""Cases in several processes of this machine: each keeps one model loaded, and ends when its parent does."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import error_finding
from unmask.audit.running.engines import EngineSettings
from unmask.audit.running.families import Families, families_of, take_family
from unmask.audit.running.worker import Worker
from unmask.errors import ServiceError

_SECONDS_BETWEEN_STEPS = 0.2  # a step that is told sooner after another stays in its process


@dataclass
class _Slot:
    """A process, the model that it holds, the rest of its family, and the case that it runs."""

    process: Any
    connection: Connection
    model: str = ""
    family: deque[Case] = field(default_factory=deque)
    case: Case | None = None

    def fill(self, waiting: dict[str, Families]) -> None:
        """Give it a case, where there is one left."""
        if not self.family and waiting:
            self.model, self.family = take_family(waiting, self.model)
        self.case = self.family.popleft() if self.family else None
        if self.case is not None:
            with suppress(OSError):  # a process that died is found out where its answer is read
                self.connection.send(self.case)

    def receive(self) -> Finding | tuple[str, int, int] | None:
        """The finding of its case, or how far the attack is; None if the process died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def give_up(self, waiting: dict[str, Families]) -> Finding:
        """The case whose process died is an error; what it has not begun is put back."""
        assert self.case is not None
        self.process.join()
        ended = f"its process ended with exit code {self.process.exitcode}; was there too little memory?"
        if self.family:
            waiting.setdefault(self.model, deque()).append(self.family)
        lost, self.case = self.case, None
        return error_finding(lost, ServiceError(ended))

    def close(self) -> None:
        """End it, whatever it does."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def run_in_processes(cases: Sequence[Case], settings: EngineSettings, device: str) -> Iterator[Finding]:
    """Findings as they come. Which process ran a case, and beside what, changes nothing in its finding."""
    waiting = families_of(cases, settings.workers)
    slots: list[_Slot] = []
    try:
        while waiting or slots:
            while waiting and len(slots) < settings.workers:
                slots.append(_start(settings.data, device, settings.threads))
                slots[-1].fill(waiting)
            ready = wait([slot.connection for slot in slots])
            for slot in [slot for slot in slots if slot.connection in ready]:
                sent = slot.receive()
                if isinstance(sent, tuple):
                    settings.progress(*sent)
                    continue
                if sent is None:
                    sent = slot.give_up(waiting)
                else:
                    slot.fill(waiting)
                if slot.case is None:
                    slots.remove(slot)
                    slot.close()
                yield sent
    finally:
        for slot in slots:
            slot.close()


def _start(data: Mapping[str, DataSet], device: str, threads: int) -> _Slot:
    """A new interpreter: torch does not survive a fork."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(there, dict(data), device, threads), daemon=True)
    process.start()
    there.close()
    return _Slot(process, here)


def _serve(parent: Connection, data: Mapping[str, DataSet], device: str, threads: int) -> None:
    """What a process does: a finding for each case, and in between how far the attack is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    last = 0.0

    def report(step: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_STEPS:
            last = time.monotonic()
            parent.send((step, done, total))

    worker = Worker(data, device, threads, report)
    while True:
        try:
            case = parent.recv()
        except EOFError:
            return  # the parent has gone
        parent.send(worker.work(case))
