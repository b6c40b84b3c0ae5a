"""Time limits: what takes longer is ended, what does not is left alone, and the timer of others comes back."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from unmask.audit.running import time_limit as module
from unmask.audit.running.time_limit import TimeLimitError, time_limit
from unmask.errors import InputError


def test_what_takes_longer_is_ended():
    with pytest.raises(TimeLimitError), time_limit(0.05):
        time.sleep(30)


@pytest.mark.parametrize("seconds", [None, 30.0])
def test_what_takes_less_is_not(seconds):
    with time_limit(seconds):
        reached = True
    assert reached
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_no_handler_for_exceptions_takes_it_for_a_failure():
    with pytest.raises(TimeLimitError), time_limit(0.05), contextlib.suppress(Exception):
        time.sleep(30)


def test_it_comes_again_where_it_was_swallowed(monkeypatch):
    monkeypatch.setattr(module, "_AGAIN", 0.05)

    def sleep_twice() -> None:
        with contextlib.suppress(TimeLimitError):
            time.sleep(30)
        time.sleep(30)

    with pytest.raises(TimeLimitError), time_limit(0.05):
        sleep_twice()


def test_the_handler_of_others_comes_back():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(30.0):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before
    with pytest.raises(TimeLimitError), time_limit(0.05):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) is before


def test_other_threads_are_refused():
    seen = []

    def work() -> None:
        try:
            with time_limit(1.0):
                pass
        except InputError as error:
            seen.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "leave time_limit out" in seen[0]
