"""What a command writes: output that outlives its reader, and warnings as notes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from unmask.cli.words import say_as_options


class _PatientOutput:
    """A stream that goes on where its reader has gone, as `head` does; what is written then goes nowhere.

    So the command ends as it would have, with its own exit code.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream writes."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        """As the stream flushes."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def patient_output() -> Iterator[None]:
    """Standard output that nobody has to read to its end."""
    before = sys.stdout
    if before is None:  # closed before the command began
        yield
        return
    patient = _PatientOutput(before)
    sys.stdout = patient
    try:
        yield
    finally:
        patient.flush()
        sys.stdout = before


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Warnings for users as one sentence each on standard error, without file and line."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if not issubclass(category, UserWarning):
                show(message, category, *rest, **more)
                return
            from unmask.terminal import note

            note(f"note: {say_as_options(str(message))}")

        warnings.showwarning = tell
        yield
