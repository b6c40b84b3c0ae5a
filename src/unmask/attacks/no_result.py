"""The recovery of an attack on texts that can claim nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unmask.recovery import Certificate, Cost, RecoveredTexts, Recovery, Status


def no_result(status: Status, reason: str, used: Sequence[str], started: float) -> Recovery[RecoveredTexts]:
    """Nothing can be claimed."""
    cost = Cost(seconds=time.perf_counter() - started)
    return Recovery(RecoveredTexts(), status, reason, Certificate.none(reason), cost, tuple(used))
