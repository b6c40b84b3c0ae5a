"""The recovery of an attack on texts that can claim nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unmask.recovery import ALL_AIMS, Aim, Certificate, Cost, RecoveredTexts, Recovery, Status


def no_result(
    status: Status, reason: str, used: Sequence[str], started: float, aims: frozenset[Aim] = ALL_AIMS
) -> Recovery[RecoveredTexts]:
    """Nothing can be claimed. Only an attack that ran to its end (NOTHING_FOUND) has looked for anything: its aims."""
    cost = Cost(seconds=time.perf_counter() - started)
    looked_for = aims if status is Status.NOTHING_FOUND else frozenset()
    return Recovery(RecoveredTexts(), status, reason, Certificate.none(reason), cost, tuple(used), looked_for)
