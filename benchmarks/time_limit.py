"""An exception after so many seconds, by the clock's signal; only in a process's main thread, where signals work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: float | None, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` in whatever takes longer; no limit if there is none."""
    if seconds is None:
        yield
        return

    def stop(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
