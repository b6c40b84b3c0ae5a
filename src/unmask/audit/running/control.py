"""The positive control: the same attack on the same secret, with everything taken away that protects it.

An attack that finds nothing behind a defence has shown something only if it finds the secret without the defence. So
each protected case is run a second time without its protection, and what came out is kept beside its finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import Finding

# What each setting is where nothing protects: one client's plain gradient in full precision, no defence.
_UNPROTECTED: Mapping[str, Any] = {"defences": [], "protocol": "fedsgd", "clients": 1}
_COARSE = ("bfloat16",)  # rounding hides as well


def control_case(case: Case) -> Case | None:
    """The case without its protection; None where nothing protects it.

    Model, texts, batch size, task, attack and seed stay. So do site and layer: another place is another attack.
    """
    plain = {**case.spec, **{key: value for key, value in _UNPROTECTED.items() if key in case.spec}}
    if plain.get("dtype") in _COARSE:
        plain["dtype"] = "float32"
    return None if plain == dict(case.spec) else Case(plain)


class Controls:
    """Controls of one worker, each run once, however many cases share it."""

    def __init__(self, run: Callable[[Case], Finding]) -> None:
        self._run = run
        self._known: dict[str, dict[str, Any]] = {}

    def keep(self, finding: Finding) -> None:
        """An unprotected case of the plan, which is the control of its protected ones."""
        self._known[finding.id] = _summary(finding)

    def of(self, case: Case) -> Mapping[str, Any] | None:
        """What the control of a case gave; None where nothing protects it."""
        control = control_case(case)
        if control is None:
            return None
        if control.id not in self._known:
            self.keep(self._run(control))
        return self._known[control.id]


def _summary(finding: Finding) -> dict[str, Any]:
    """What a gate asks of a control. No text is in it, nor the message of a foreign error."""
    document = asdict(finding)
    return {name: document[name] for name in ("id", "case", "status", "reason", "metrics")}
