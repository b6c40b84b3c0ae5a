"""Which defence stopped a leak, measured in the same audit: other findings that differ in defence or protocol alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unmask.audit.finding import Finding, Outcome
from unmask.harmless import shown
from unmask.report.case_names import SEPARATOR, defences_name, setting
from unmask.report.numbers import leak

_PROTECTION = ("defences", "protocol", "clients")


class Effect(Enum):
    """What another finding of the same case under another protection showed."""

    STOPPED = "stopped"
    REDUCED = "reduced"
    UNCLEAR = "could not tell"  # never 'stopped': the attack did not apply or did not end


@dataclass(frozen=True)
class Stop:
    """A finding that shows what a protection does to a leak."""

    effect: Effect
    finding: Finding

    @property
    def protection(self) -> str:
        """Protocol and defences of that finding."""
        return protection_name(self.finding.case)


def protection_name(case: Mapping[str, Any]) -> str:
    """What a case says of its protection."""
    protocol = [setting("protocol", case["protocol"])] if case.get("protocol", "fedsgd") != "fedsgd" else []
    clients = [f"{shown(case['clients'])} clients summed"] if case.get("clients", 1) != 1 else []
    defences = [defences_name(case["defences"])] if case.get("defences") else []
    return SEPARATOR.join([*protocol, *clients, *defences]) or defences_name(())


class Stops:
    """All findings by what they share, so that the counterparts of one are found at once."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._alike: dict[str, list[Finding]] = defaultdict(list)
        for finding in findings:
            self._alike[_rest(finding.case)].append(finding)

    def of(self, finding: Finding) -> list[Stop]:
        """What stopped or reduced a leak, the strongest effect first; empty for a finding that shows none."""
        if finding.outcome is not Outcome.LEAK:
            return []
        stops = [
            Stop(effect, other)
            for other in self._alike[_rest(finding.case)]
            if not _is_weaker(other.case, finding.case) and (effect := _effect(finding, other)) is not None
        ]
        order = list(Effect)
        return sorted(stops, key=lambda stop: (order.index(stop.effect), (leak(stop.finding) or ("", 0.0))[1]))


def _rest(case: Mapping[str, Any]) -> str:
    return json.dumps(
        {key: value for key, value in case.items() if key not in _PROTECTION}, sort_keys=True, default=str
    )


def _is_weaker(other: Mapping[str, Any], case: Mapping[str, Any]) -> bool:
    """Whether the other case has the same protocol and no defence that this one has not."""
    same = all(other.get(key) == case.get(key) for key in ("protocol", "clients"))
    return same and set(other.get("defences", ())) <= set(case.get("defences", ()))


def _effect(finding: Finding, other: Finding) -> Effect | None:
    if other.outcome is Outcome.NO_LEAK:
        return Effect.STOPPED
    if other.outcome is Outcome.INCONCLUSIVE:
        return Effect.UNCLEAR
    before, after = leak(finding), leak(other)
    if other.outcome is Outcome.LEAK and before and after and before[0] == after[0] and after[1] < before[1]:
        return Effect.REDUCED
    return None
