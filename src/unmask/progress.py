"""What a long computation does, how much of that is done, and the time that is left.

Code that may take seconds tells its steps, wherever it is, and whoever watches is told; nothing is handed down.

    for item in track(items, "reading texts"): …          one step of so many
    tell("growing prefixes", len(found), most)            the same by hand; 0 of 1 where nothing can be counted
    tell_detail("solving equations")                      what is done for the step that runs

The time that is left is that of the step, at the pace that it had so far. Threads that a step starts tell nobody.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

# The step in words, how much of it is done, and how much it is in all as far as known.
Progress = Callable[[str, int, int], None]

QUIET = "UNMASK_QUIET"  # the environment variable that turns the display of the Python API off
_FIRST_SECONDS = 3.0  # what is done before shows nothing
_SECONDS_BETWEEN_LINES = 30.0  # where the display is no terminal
_SECONDS_BETWEEN_LOOKS = 0.5  # in a terminal
_BAR = 20  # characters

T = TypeVar("T")


def silent(step: str, done: int, total: int) -> None:
    """Watch nothing."""


_WATCHER: ContextVar[Progress | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(progress: Progress) -> Iterator[None]:
    """Tell `progress` every step of what runs inside."""
    token = _WATCHER.set(progress)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def is_watched() -> bool:
    """Whether somebody is told already."""
    return _WATCHER.get() is not None


def tell(step: str, done: int, total: int) -> None:
    """Tell what is done now, and how much of it."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(step, done, total)


def tell_detail(what: str) -> None:
    """Tell what is done for the step that runs: as a step of 0 of 0."""
    tell(what, 0, 0)


def track(items: Sequence[T], step: str) -> Iterator[T]:
    """The items, each of them told before it is worked on."""
    for done, item in enumerate(items):
        tell(step, done, len(items))
        yield item
    tell(step, len(items), len(items))


@dataclass
class _Step:
    """A step since it was told first, or since it began again."""

    began: float
    first: int
    done: int
    total: int
    told: float


@dataclass
class Pace:
    """The step that runs, and how long it will take at its pace so far. Call it as a `Progress`, read it as text."""

    clock: Callable[[], float] = time.monotonic
    _steps: dict[str, _Step] = field(default_factory=dict, init=False)
    _name: str = field(default="", init=False)
    _detail: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def __call__(self, step: str, done: int, total: int) -> None:
        """Follow a step; one that is told with less done than before has begun again."""
        if total == 0 and self._name:
            self._detail = f" ({step})"
            return
        now, known = self.clock(), self._steps.get(step)
        if known is None or done < known.done:
            known = self._steps[step] = _Step(now, done, done, total, now)
        if done > known.done:
            known.told = now
        known.done, known.total, self._name, self._detail = done, total, step, ""

    @property
    def seconds(self) -> float:
        """Since somebody watches."""
        return self.clock() - self.began

    @property
    def share(self) -> float | None:
        """How much of the step is done; None where that is not known."""
        step = self._steps.get(self._name)
        return step.done / step.total if step is not None and step.total > 1 else None

    @property
    def seconds_left(self) -> float | None:
        """Of the step, at its pace so far; None before anything of it is done, and where it has taken longer."""
        step = self._steps.get(self._name)
        if step is None or step.done <= step.first:
            return None
        pace = (step.told - step.began) / (step.done - step.first)
        left = pace * (step.total - step.done) - (self.clock() - step.told)
        return left if left > 0 else None

    def __str__(self) -> str:
        step = self._steps.get(self._name)
        if step is None:
            return f"starting · {describe_seconds(self.seconds)} so far"
        if step.done >= step.total:
            return f"{self._name}: done, going on · {describe_seconds(self.seconds)} so far"
        share, left = self.share, self.seconds_left
        counted = "" if share is None else f": {share:.0%}"
        rest = f", about {describe_seconds(left)} left" if left is not None else ""
        return f"{self._name}{counted}{rest}{self._detail} · {describe_seconds(self.seconds)} so far"


def describe_seconds(seconds: float) -> str:
    """'40 s', '3 min', '2.5 h': as rough as an estimate is."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show every step on standard error, from the third second on: a line that changes; in a log, a line at times."""
    pace, ended, stream = Pace(), threading.Event(), sys.stderr
    is_terminal = stream is not None and stream.isatty()
    display = threading.Thread(target=_display, args=(pace, ended, is_terminal), daemon=True)
    display.start()
    try:
        yield pace
    finally:
        ended.set()
        display.join()


@contextmanager
def shown_unless_watched(progress: Progress | None) -> Iterator[None]:
    """Tell `progress`; where it is None, whoever watches already, else standard error, unless it is to be quiet."""
    if progress is not None:
        with watched_by(progress):
            yield
    elif is_watched() or os.environ.get(QUIET):
        yield
    else:
        with shown_progress() as shown, watched_by(shown):
            yield


def _display(pace: Pace, ended: threading.Event, is_terminal: bool) -> None:
    """Write what is done now until it has ended."""
    wait, has_written = _FIRST_SECONDS, False
    while not ended.wait(wait):
        try:
            if is_terminal:
                sys.stderr.write(f"\r\x1b[K{_fit(_bar(pace.share) + str(pace))}")
            else:
                sys.stderr.write(f"{pace}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # nobody reads any more
        wait, has_written = (_SECONDS_BETWEEN_LOOKS if is_terminal else _SECONDS_BETWEEN_LINES), True
    if is_terminal and has_written:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _bar(share: float | None) -> str:
    full = round(_BAR * (share or 0.0))
    return f"[{'=' * full}{' ' * (_BAR - full)}] "


def _fit(line: str) -> str:
    """The line cut to the terminal: one that wraps cannot be written over."""
    import shutil

    return line[: max(10, shutil.get_terminal_size().columns - 1)]
