"""Two audits of the same cases: what leaks more than before, what leaks less, and what nobody can compare.

A case is matched by its id, the hash of its specification; where that fails, by its specification without the folders
of its model and the hash of its data. For a matched case with findings b (before) and a (after):

    worse         a leaks and b was not known to leak, or a number of COMPARED is higher in a
    better        b leaks, a number is lower in a, and a's attack would have found it: it ran to its end, looked for
                  it, and finds more without protection
    same          neither
    not compared  a or b raised, did not end, was not run, or has other texts; never an improvement

Shares that differ by no more than a tolerance are equal; so are scores that are both within chance.

Limits: a change may be the system's, the attack's (another version of unmask) or the weights'; `notes` say what
differs.
Cost: reading both folders; no model is loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import CROSSED, INCONCLUSIVE, PASSED
from unmask.errors import InputError
from unmask.metrics import METRICS
from unmask.recovery import Status
from unmask.report.numbers import format_value, leak_in_full, number
from unmask.safe_text import make_safe, value_without_folders
from unmask.wording import count_noun

TOLERANCE = 0.005  # shares that people read as the same percentage
# Numbers that are higher where more leaks. The rate of exact texts says the same as their number.
COMPARED = tuple(
    name
    for name, metric in METRICS.items()
    if (metric.is_whole or metric.is_amount or name in ("certain_texts", "rouge2")) and name != "exact_rate"
)
_CLAIMS = {"texts": "Texts claimed", "tokens": "Tokens claimed"}  # where nobody knows the secret
_STRENGTH = {Status.RECOVERED.name: 2, Status.PARTIAL.name: 1}
_KNOWN = (Outcome.LEAK, Outcome.NO_LEAK)
_MOST_NAMED = 3  # numbers that changed, in one sentence


class Direction(Enum):
    """What became of a case. The value is what people read."""

    WORSE = "worse"
    OPEN = "not compared"
    BETTER = "better"
    NEW = "new"
    GONE = "gone"
    SAME = "same"


@dataclass(frozen=True)
class Change:
    """A case of either audit, its findings, and what became of it in a sentence without a full stop."""

    direction: Direction
    case: Mapping[str, Any]
    before: Finding | None
    after: Finding | None
    why: str

    @property
    def is_lost(self) -> bool:
        """Whether something was known before and nobody knows now."""
        is_open = self.direction in (Direction.OPEN, Direction.GONE)
        return is_open and self.before is not None and self.before.outcome in _KNOWN

    @property
    def is_new_leak(self) -> bool:
        """Whether a case leaks that the first audit did not have: perhaps an old one that lost its protection."""
        return self.direction is Direction.NEW and self.after is not None and self.after.outcome is Outcome.LEAK


@dataclass(frozen=True)
class Comparison:
    """Every case of both audits, and what else differs between them."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def of(self, direction: Direction) -> tuple[Change, ...]:
        """The cases that went this way."""
        return tuple(change for change in self.changes if change.direction is direction)

    @property
    def exit_code(self) -> int:
        """1 with a regression; 3 where a result is gone, a leak is new, or nothing was compared; else 0."""
        if self.of(Direction.WORSE):
            return CROSSED
        compared = self.of(Direction.SAME) or self.of(Direction.BETTER)
        is_open = any(change.is_lost or change.is_new_leak for change in self.changes)
        return INCONCLUSIVE if is_open or not compared else PASSED

    @property
    def headline(self) -> str:
        """The whole comparison in one sentence."""
        counts = Counter(change.direction for change in self.changes)
        rest = ", ".join(
            f"{counts[one]} {one.value}" for one in Direction if counts[one] and one is not Direction.WORSE
        )
        if counts[Direction.WORSE]:
            return f"{count_noun(counts[Direction.WORSE], 'case')} got worse{f'; {rest}' if rest else ''}."
        if self.exit_code == INCONCLUSIVE:
            lost = sum(change.is_lost for change in self.changes)
            leaks = sum(change.is_new_leak for change in self.changes)
            what = [f"{count_noun(lost, 'case')} cannot be compared any more"] if lost else []
            verbs = "leaks and has" if leaks == 1 else "leak and have"
            what += [f"{count_noun(leaks, 'new case')} {verbs} no baseline"] if leaks else []
            told = ", and ".join(what) or "no case could be compared"
            return f"Inconclusive: {told}, so a regression cannot be ruled out; {rest}."
        return f"No case got worse; {rest}."


def compare_audits(before: Audit, after: Audit, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two audits case by case, regressions first."""
    changes = [_change(case, old, new, tolerance) for case, old, new in _match(before, after)]
    if not any(change.direction not in (Direction.NEW, Direction.GONE) for change in changes):
        raise InputError(
            f"no case is in both audits: the first has {len(_cases(before))}, the second {len(_cases(after))}, and "
            "none has the same channel, model, data, protocol, defences, attack and seed; compare two runs of one plan"
        )
    order = list(Direction)
    changes.sort(key=lambda change: order.index(change.direction))
    return Comparison(tuple(changes), tuple(_notes(before, after, changes)))


_Pair = tuple[Mapping[str, Any], "_Entry | None", "_Entry | None"]


@dataclass(frozen=True)
class _Entry:
    """A case of an audit, and its finding if it was run."""

    id: str
    case: Mapping[str, Any]
    finding: Finding | None


def _cases(audit: Audit) -> dict[str, _Entry]:
    missing = set(audit.missing)
    entries = [_Entry(finding.id, finding.case, finding) for finding in audit.findings]
    entries += [_Entry(case["id"], case["case"], None) for case in audit.planned if case["id"] in missing]
    return {entry.id: entry for entry in entries}


def _match(before: Audit, after: Audit) -> Iterator[_Pair]:
    old, new = _cases(before), _cases(after)
    pairs = {id: id for id in old if id in new}
    names = [_by_name([entry for entry in side.values() if entry.id not in pairs]) for side in (old, new)]
    pairs |= {names[0][name].id: names[1][name].id for name in names[0] if name in names[1]}
    for id, entry in old.items():
        yield entry.case, entry, new[pairs[id]] if id in pairs else None
    matched = set(pairs.values())
    yield from ((entry.case, None, entry) for entry in new.values() if entry.id not in matched)


def _by_name(entries: Sequence[_Entry]) -> dict[str, _Entry]:
    """Entries by what they say without folders and hashes of data; names that several share match nothing."""
    names = [name_without_folders(entry.case) for entry in entries]
    counts = Counter(names)
    return {name: entry for name, entry in zip(names, entries, strict=True) if counts[name] == 1}


def name_without_folders(case: Mapping[str, Any]) -> str:
    """What a case says, without the folders of its model and the hash of its data."""
    named = dict(case)
    if "model" in named:
        named["model"] = value_without_folders(str(named["model"]))
    if isinstance(named.get("data"), Mapping):
        named["data"] = named["data"].get("name")
    return json.dumps(named, sort_keys=True, default=str)


def _change(case: Mapping[str, Any], old: _Entry | None, new: _Entry | None, tolerance: float) -> Change:
    before, after = (None if entry is None else entry.finding for entry in (old, new))
    if old is None:
        why = f"now: {_state(after) if after else 'not run'}; the first audit has no such case"
        return Change(Direction.NEW, case, None, after, why)
    if new is None:
        why = f"before: {_state(before) if before else 'not run'}; the second audit has no such case"
        return Change(Direction.GONE, case, before, None, why)
    if before is None or after is None:
        where = "either audit" if before is after else "the first audit" if before is None else "the second audit"
        return Change(Direction.OPEN, case, before, after, f"it was not run in {where}")
    direction, why = judge_change(before, after, tolerance)
    return Change(direction, case, before, after, why)


def judge_change(before: Finding, after: Finding, tolerance: float = TOLERANCE) -> tuple[Direction, str]:
    """What became of one case, and why. Only what is known on both sides can be better or the same."""
    if _texts_of(before) != _texts_of(after):
        return Direction.OPEN, "its texts differ from before"
    if after.outcome is Outcome.LEAK and before.outcome is not Outcome.LEAK:
        return Direction.WORSE, f"before: {_state(before)}; now it leaks: {leak_in_full(after)}"
    if before.outcome not in _KNOWN or after.outcome not in _KNOWN:
        return Direction.OPEN, f"before: {_state(before)}; now: {_state(after)}, which is no improvement"
    if before.outcome is after.outcome is Outcome.NO_LEAK:
        return Direction.SAME, "not leaked by this attack, before and now"
    steps = _steps(before, after, tolerance)
    if steps is None:
        return Direction.OPEN, "no number was measured in both"
    if higher := [step for step in steps if step.after > step.before]:
        return Direction.WORSE, _in_words(higher)
    if not steps:
        return Direction.SAME, f"as before: {leak_in_full(after)}"
    if doubt := _doubt(after, steps):
        return Direction.OPEN, f"{_in_words(steps)}, but {doubt}, so this is no improvement"
    return Direction.BETTER, _in_words(steps)


@dataclass(frozen=True)
class _Step:
    """A number that changed."""

    name: str
    title: str
    before: float
    after: float

    def __str__(self) -> str:
        if self.name == "status":
            return self.title
        return f"{self.title}: {format_value(self.name, self.before)} → {format_value(self.name, self.after)}"


def _steps(before: Finding, after: Finding, tolerance: float) -> list[_Step] | None:
    """Numbers that changed; None where none is in both."""
    old, new = _numbers(before), _numbers(after)
    steps = [_Step(name, _title(name), old[name], new[name]) for name in old if name in new]
    if not steps:
        return None
    changed = [step for step in steps if abs(step.after - step.before) > (tolerance if _is_share(step.name) else 0)]
    strength = [float(_STRENGTH.get(finding.status, 0)) for finding in (before, after)]
    if not changed and strength[0] != strength[1]:
        changed = [_Step("status", f"status: {before.status} → {after.status}", *strength)]
    return changed


def _numbers(finding: Finding) -> dict[str, float]:
    """What is compared of a finding; where nobody knows the secret, how much is claimed."""
    if not finding.metrics:
        return {"texts": float(len(finding.texts)), "tokens": float(len(finding.tokens))}
    return {name: value for name in COMPARED if (value := number(finding.metrics, name)) is not None}


def _title(name: str) -> str:
    return METRICS[name].title if name in METRICS else _CLAIMS[name]


def _is_share(name: str) -> bool:
    return name in METRICS and METRICS[name].is_share


def _doubt(after: Finding, steps: Sequence[_Step]) -> str:
    """Why the attack may have found less without there being less to find; empty where nothing says so."""
    if not after.ran_to_the_end:
        return f"the attack did not end ({after.status})"
    for step in steps:
        metric = METRICS.get(step.name)
        if metric is None:
            continue
        if metric.aim.value not in after.looked_for:
            return f"the attack did not look for {metric.aim.value} this time"
        if after.control is not None:
            plain = number(after.control["metrics"], step.name)
            if plain is None or plain <= step.after:
                return "this time the same attack finds no more without protection"
    return ""


def _in_words(steps: Sequence[_Step]) -> str:
    more = f" and {len(steps) - _MOST_NAMED} more" if len(steps) > _MOST_NAMED else ""
    return f"{', '.join(map(str, steps[:_MOST_NAMED]))}{more}"


def _state(finding: Finding) -> str:
    """The outcome; of one that is not known also the status."""
    known = finding.outcome in _KNOWN or finding.outcome is Outcome.ERROR
    return finding.outcome.value if known else f"{finding.outcome.value} ({finding.status})"


def _texts_of(finding: Finding) -> Any:
    data = finding.case.get("data")
    return data.get("sha256") if isinstance(data, Mapping) else data


def _notes(before: Audit, after: Audit, changes: Sequence[Change]) -> Iterator[str]:
    """What else differs, so that a change is not put down to the wrong cause."""
    versions = [make_safe(audit.manifest.get("unmask", "?"), 40) for audit in (before, after)]
    if versions[0] != versions[1]:
        yield f"made by unmask {versions[0]} and {versions[1]}: a change may come from the attack"
    pairs = [(change.before, change.after) for change in changes if change.before and change.after]
    fingerprints = [(old.model_fingerprint, new.model_fingerprint) for old, new in pairs]
    if others := sum(None not in two and two[0] != two[1] for two in fingerprints):
        yield f"the weights of the model differ in {count_noun(others, 'case')}"
    for name, audit in (("first", before), ("second", after)):
        if audit.num_damaged:
            yield f"{count_noun(audit.num_damaged, 'line')} of the {name} audit's findings could not be read"
