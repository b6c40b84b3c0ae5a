"""Which worker takes which cases: one model at a time, and cases that share a control together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from unmask.audit.cases.case import Case
from unmask.audit.running.worker import control_case

Families = deque[deque[Case]]


def families_of(cases: Iterable[Case], num_workers: int) -> dict[str, Families]:
    """Cases by model. Those that share a control are one family: one worker takes them, and runs the control once.

    With fewer families than workers they are split, as workers without work cost more than a control.
    """
    found: dict[str, dict[str, deque[Case]]] = {}
    for case in cases:
        found.setdefault(case["model"], {}).setdefault((control_case(case) or case).id, deque()).append(case)
    if sum(map(len, found.values())) >= num_workers:
        return {model: deque(families.values()) for model, families in found.items()}
    return {
        model: deque(deque([case]) for family in families.values() for case in family)
        for model, families in found.items()
    }


def take_family(waiting: dict[str, Families], model: str) -> tuple[str, deque[Case]]:
    """The next family for a worker that holds a model: of this model, else of the one with the most cases."""
    if model not in waiting:
        model = max(waiting, key=lambda name: sum(map(len, waiting[name])))
    family = waiting[model].popleft()
    if not waiting[model]:
        del waiting[model]
    return model, family
