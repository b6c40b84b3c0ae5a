"""Which defence stopped a leak, measured in the same audit: other findings that differ in defence or protocol alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unmask.audit.cases.case_names import SEPARATOR, defences_name, is_live, setting
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.gates import Ruling
from unmask.audit.findings.verdict import Verdict
from unmask.metrics import AMOUNTS
from unmask.report.numbers import leak, leak_in_full, number
from unmask.safe_text import make_safe
from unmask.specs import split_text

_PROTECTION = ("defences", "protocol", "clients")
# Settings that protect the more, the larger or the smaller they are; of other settings nobody can say it.
_LARGER = frozenset({"sigma", "noise_multiplier", "clients", "local_steps"})
_SMALLER = frozenset({"decimals", "max_norm", "max_grad_norm", "norm", "share", "k", "queries"})


class Effect(Enum):
    """What the other findings of the same case under another protection showed, over all seeds."""

    STOPPED = "stopped"
    SOMETIMES = "stopped in some seeds"  # never 'stopped': another seed leaks, raised or is inconclusive
    REDUCED = "reduced"
    UNCLEAR = "inconclusive"  # never 'stopped': the attack did not apply, did not end, or did not look


@dataclass(frozen=True)
class Counterpart:
    """A finding of the same seed under another protection, and how many of all seeds leak nothing there."""

    effect: Effect
    finding: Finding
    num_stopped: int
    num_seeds: int

    @property
    def protection(self) -> str:
        """Protocol and defences of that finding."""
        return protection_name(self.finding.case)


def protection_name(case: Mapping[str, Any]) -> str:
    """What a case says of its protection."""
    protocol = [setting("protocol", case["protocol"])] if case.get("protocol", "fedsgd") != "fedsgd" else []
    clients = [f"{make_safe(case['clients'])} clients summed"] if case.get("clients", 1) != 1 else []
    defences = [defences_name(case["defences"])] if case.get("defences") else []
    return SEPARATOR.join([*protocol, *clients, *defences]) or defences_name(())


def is_protected(case: Mapping[str, Any]) -> bool:
    """Whether anything protects a case."""
    return bool(_parts(case))


def cell_of(case: Mapping[str, Any]) -> str:
    """What a case is without its protection, as a key."""
    return _without(case, _PROTECTION)


def without_controls(verdict: Verdict) -> list[Finding]:
    """Findings without the controls: protected cases without a gate, beside cases with one that differ in that alone.

    A control's noise leaves nothing of what is sent: nobody would use it.
    """
    gated = {judgement.finding.id for judgement in verdict.judgements}
    cells = {cell_of(finding.case) for finding in verdict.findings if finding.id in gated}

    def is_control(finding: Finding) -> bool:
        return is_protected(finding.case) and finding.id not in gated and cell_of(finding.case) in cells

    return [finding for finding in verdict.findings if not is_control(finding)]


def crossed_gates(verdict: Verdict) -> dict[str, list[str]]:
    """The gates that each finding crosses, by its id."""
    crossed: dict[str, list[str]] = defaultdict(list)
    for judgement in verdict.judgements:
        if judgement.ruling is Ruling.CROSSED:
            crossed[judgement.finding.id].append(str(judgement.gate))
    return crossed


def unclear_findings(verdict: Verdict) -> frozenset[str]:
    """Findings of nothing that show nothing, by id: the attack did not look, or a gate on them is inconclusive."""
    undecided = {judgement.finding.id for judgement in verdict.inconclusive}
    quiet = (finding for finding in verdict.findings if finding.outcome is Outcome.NO_LEAK)
    return frozenset(finding.id for finding in quiet if not finding.looked_for or finding.id in undecided)


class Counterparts:
    """All findings but controls by what they share, so that the counterparts of one are found at once."""

    def __init__(self, verdict: Verdict) -> None:
        self._alike: dict[str, list[Finding]] = defaultdict(list)
        self._seeds: dict[str, list[Finding]] = defaultdict(list)
        self._crossed, self._unclear = frozenset(crossed_gates(verdict)), unclear_findings(verdict)
        for finding in without_controls(verdict):
            self._alike[cell_of(finding.case)].append(finding)
            self._seeds[_without(finding.case, ("seed",))].append(finding)

    def of(self, finding: Finding) -> list[Counterpart]:
        """What stopped or reduced a leak, the strongest effect first; empty for a finding that shows none."""
        if finding.outcome is not Outcome.LEAK or is_live(finding.case):
            return []
        others = [
            other
            for other in self._alike[cell_of(finding.case)]
            if not _is_weaker(_parts(other.case), _parts(finding.case))
        ]
        stops = [stop for other in others if (stop := self._stop(finding, other)) is not None]
        order = list(Effect)
        return sorted(stops, key=lambda stop: (order.index(stop.effect), (leak(stop.finding) or ("", 0.0))[1]))

    def _stop(self, finding: Finding, other: Finding) -> Counterpart | None:
        seeds = self._seeds[_without(other.case, ("seed",))]
        shows_nothing = self._crossed | self._unclear
        num_stopped = sum(one.outcome is Outcome.NO_LEAK and one.id not in shows_nothing for one in seeds)
        if num_stopped:
            effect = Effect.STOPPED if num_stopped == len(seeds) else Effect.SOMETIMES
        elif other.outcome is Outcome.INCONCLUSIVE or other.id in self._unclear - self._crossed:
            effect = Effect.UNCLEAR
        elif other.outcome is Outcome.LEAK and _is_less(other, finding):
            effect = Effect.REDUCED
        else:
            return None
        return Counterpart(effect, other, num_stopped, len(seeds))


def _without(case: Mapping[str, Any], keys: Sequence[str]) -> str:
    return json.dumps({key: value for key, value in case.items() if key not in keys}, sort_keys=True, default=str)


def _is_less(other: Finding, finding: Finding) -> bool:
    """Whether no amount is larger and one is smaller, as far as it is told: tokens, exact texts, weights."""
    after, before = ([number(one.metrics, name) for name in AMOUNTS] for one in (other, finding))
    if [value is None for value in after] != [value is None for value in before]:
        return False
    steps = [new - old for new, old in zip(after, before, strict=True) if new is not None and old is not None]
    return bool(steps) and max(steps) <= 0 and min(steps) < 0 and leak_in_full(other) != leak_in_full(finding)


def _parts(case: Mapping[str, Any]) -> list[str]:
    """Everything that protects; empty for one client's plain gradients, states or answers."""
    protocol = [str(case["protocol"])] if case.get("protocol", "fedsgd") != "fedsgd" else []
    clients = [f"sum:clients={case['clients']}"] if case.get("clients", 1) != 1 else []
    return [*protocol, *clients, *map(str, case.get("defences") or ())]


def _is_weaker(other: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether all that protects the other case is here too, as strong or stronger; nothing at all is weaker."""
    return all(any(_is_at_most(one, part) for part in parts) for one in other)


def _is_at_most(one: str, part: str) -> bool:
    (kind, settings), (other_kind, others) = _read(one), _read(part)
    if kind != other_kind or settings.keys() != others.keys():
        return False
    return all(_protects_no_more(key, settings[key], others[key]) for key in settings)


def _read(text: str) -> tuple[str, dict[str, str]]:
    name, parts = split_text(text)
    return name, {key: value for key, _, value in (part.partition("=") for part in parts)}


def _protects_no_more(key: str, value: str, other: str) -> bool:
    if value == other:
        return True
    try:
        difference = float(value) - float(other)
    except ValueError:
        return False
    return (key in _LARGER and difference <= 0) or (key in _SMALLER and difference >= 0)
