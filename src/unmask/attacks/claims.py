"""What an attack may claim of texts where it found none: nothing, or the tokens without their order."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.attacks.run import Run
from unmask.recovery import ALL_AIMS, Aim, Certificate, RecoveredTexts, Recovery, Status


def claim_nothing(
    run: Run, status: Status, reason: str, used: Sequence[str] = (), aims: frozenset[Aim] = ALL_AIMS
) -> Recovery[RecoveredTexts]:
    """Nothing can be claimed. Only an attack that ran to its end (NOTHING_FOUND) has looked for anything: its aims."""
    looked_for = aims if status is Status.NOTHING_FOUND else frozenset()
    return Recovery(RecoveredTexts(), status, reason, Certificate.none(reason), run.cost(), tuple(used), looked_for)
