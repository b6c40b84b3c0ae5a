"""Which outcomes of its own audit keep a client from sending an update."""

from __future__ import annotations

from unmask.audit.findings.finding import Outcome
from unmask.errors import InputError

_UNLESS_CLEAR = frozenset(Outcome) - {Outcome.NO_LEAK}
_REFUSED: dict[bool | str, frozenset[Outcome]] = {
    False: frozenset(),
    True: _UNLESS_CLEAR,
    "unless-clear": _UNLESS_CLEAR,
    "leaks": frozenset({Outcome.LEAK, Outcome.ERROR}),
}


def refused_outcomes(refuse: bool | str, *, save_evidence: bool = False) -> frozenset[Outcome]:
    """Outcomes with which nothing is sent: none (False), all but a clear one (True, 'unless-clear'), or 'leaks'."""
    if refuse and save_evidence:
        raise InputError("refuse needs the attack's answer at once; leave save_evidence out")
    if refuse not in _REFUSED:
        raise InputError(f"refuse must be one of {', '.join(map(repr, _REFUSED))}, got {refuse!r}")
    return _REFUSED[refuse]
