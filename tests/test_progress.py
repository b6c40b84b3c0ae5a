"""Progress: what is done, how much of it, and the time that is left, by a clock that the test sets."""

from __future__ import annotations

import io
import sys
import time

import pytest

import unmask
from unmask import progress
from unmask.progress import Pace, describe_seconds, shown_progress, silent, tell, tell_detail, track, watched_by
from unmask.terminal import working


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_that_of_the_step_at_its_pace():
    clock = Clock()
    pace = Pace(clock)
    assert "starting" in str(pace)
    pace("reading texts", 0, 10)
    assert pace.seconds_left is None
    clock.now = 20.0
    pace("reading texts", 2, 10)
    assert pace.seconds_left == 80.0
    clock.now = 30.0  # nothing is told meanwhile: less time is left
    assert pace.seconds_left == 70.0
    assert str(pace) == "reading texts: 20%, about 70 s left · 30 s so far"
    clock.now = 200.0
    assert str(pace) == "reading texts: 20% · 3 min so far"  # it takes longer than it seemed to: nothing is promised
    pace("reading texts", 10, 10)
    assert str(pace) == "reading texts: done, going on · 3 min so far"


def test_a_step_keeps_its_pace_behind_another_and_loses_it_when_it_begins_again():
    clock = Clock()
    pace = Pace(clock)
    for now, news in ((0.0, ("outer", 0, 4)), (6.0, ("inner", 0, 1)), (10.0, ("outer", 1, 4))):
        clock.now = now
        pace(*news)
    assert pace.seconds_left == 30.0
    pace("inner", 0, 1)  # what cannot be counted has no time left
    assert (pace.share, pace.seconds_left) == (None, None)
    pace("outer", 0, 4)
    assert pace.seconds_left is None


def test_a_detail_does_not_hide_the_step():
    clock = Clock()
    pace = Pace(clock)
    pace("columns of W", 0, 4)
    clock.now = 5.0
    pace("columns of W", 1, 4)
    with watched_by(pace):
        tell_detail("asking the oracle")
    assert str(pace) == "columns of W: 25%, about 15 s left (asking the oracle) · 5 s so far"


def test_only_who_watches_is_told():
    told = []
    with watched_by(lambda *news: told.append(news)):
        assert list(track("ab", "letters")) == ["a", "b"]
        with watched_by(silent):
            tell("inside", 0, 1)
    tell("outside", 0, 1)
    assert told == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2)]


@pytest.mark.parametrize(("seconds", "said"), [(7.4, "7 s"), (200, "3 min"), (9000, "2.5 h")])
def test_seconds_are_said_as_roughly_as_they_are_known(seconds, said):
    assert describe_seconds(seconds) == said


def wait_for(stream: io.StringIO, said: str) -> None:
    deadline = time.monotonic() + 10
    while said not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_a_log_gets_lines_and_a_terminal_one_line_that_goes_away(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    for name in ("_FIRST_SECONDS", "_SECONDS_BETWEEN_LINES", "_SECONDS_BETWEEN_LOOKS"):
        monkeypatch.setattr(progress, name, 0.01)
    with shown_progress() as shown:
        shown("growing prefixes", 1, 2)
        wait_for(stream, "growing prefixes: 50%")
    shown_text = stream.getvalue()
    assert "growing prefixes: 50%" in shown_text
    assert shown_text.endswith("\r\x1b[K" if stream.isatty() else "so far\n")


def test_what_a_command_waits_for_is_said_in_a_log_too(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.01)
    with working("loading the model"):
        wait_for(stream, "loading the model · ")
        tell("converting", 0, 1)  # what is done for it
    assert not progress.is_watched()


def test_what_is_done_at_once_shows_nothing(capsys):
    with shown_progress() as shown:
        shown("growing prefixes", 1, 2)
    assert capsys.readouterr().err == ""


def test_the_api_shows_progress_by_default_and_is_quiet_where_that_is_wanted(tiny_llama, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.0)
    evidence = unmask.observe_gradients(tiny_llama, [[5, 6, 7], [8, 9, 10, 11]])
    unmask.recover_text(evidence, tiny_llama, progress=silent)
    with watched_by(lambda *news: None):
        unmask.recover_text(evidence, tiny_llama)
    with monkeypatch.context() as quiet:
        quiet.setenv(progress.QUIET, "1")
        unmask.recover_text(evidence, tiny_llama)
    assert stream.getvalue() == ""
    unmask.recover_text(evidence, tiny_llama)
    assert "so far" in stream.getvalue()
