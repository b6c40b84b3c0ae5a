"""Output that outlives its reader, and warnings as notes."""

from __future__ import annotations

import os
import sys
import warnings

import pytest

from unmask.cli.streams import patient_output, warnings_as_notes


def test_output_to_a_reader_that_has_gone_goes_nowhere(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with patient_output():
            assert sys.stdout.fileno() == writing
            for _ in range(3):
                assert sys.stdout.write("x" * 100_000) == 100_000
                sys.stdout.flush()
        assert sys.stdout is stream


def test_output_that_is_read_arrives(capsys):
    with patient_output():
        sys.stdout.write("hello")
    assert capsys.readouterr().out == "hello"


def test_no_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with patient_output():
        assert sys.stdout is None


def test_warnings_for_users_are_notes(capsys):
    with warnings_as_notes():
        warnings.simplefilter("always")
        warnings.warn("two texts were cut\x1b[31m", UserWarning, stacklevel=1)
    shown = capsys.readouterr().err
    assert shown.startswith("note: two texts were cut")
    assert ".py" not in shown
    assert "\x1b[31m" not in shown


def test_other_warnings_are_left_alone():
    with pytest.warns(DeprecationWarning, match="old"), warnings_as_notes():
        warnings.warn("old", DeprecationWarning, stacklevel=1)
