"""An end after so many seconds for whatever takes longer, by the system's timer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from unmask.errors import InputError

_AGAIN = 5.0  # seconds after which the signal is sent again, where the first exception was swallowed


class TimeLimitError(BaseException):
    """The time is over. Like Ctrl-C it is no `Exception`, so that nothing on the way takes it for a failure."""


@contextmanager
def time_limit(seconds: float | None, error: type[BaseException] = TimeLimitError) -> Iterator[None]:
    """Raise `error` in whatever takes longer; no limit if there is none.

    Limits: needs a system with SIGALRM and the process's main thread. One call of a library, as a decomposition, is not
    interrupted: the exception comes behind it.
    """
    if seconds is None:
        yield
        return
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        raise InputError("a time limit needs Linux or macOS, and the main thread of a process; leave time_limit out")

    def stop(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
