"""A plan: models × data × tasks × protocols × defences × attacks × seeds, and the gates that must hold. TOML.

    title = "The keyboard federation"
    gates = ["no near-exact text"]       # for every group that has no gates of its own
    time_limit = 600                     # seconds a case, likewise

    [data.notes]
    file = "notes.txt"                   # one text a line

    [[gradients]]                        # every combination of the lists is a case
    models = ["smollm2-135m"]
    data = ["notes"]
    batch_sizes = [1, 4]
    protocols = ["fedsgd", "fedavg:local_steps=4"]
    defences = ["none", "noise:sigma=1e-3", ["clip:norm=1", "int8"]]
    seeds = [0, 1, 2]

`[[outputs]]`, `[[caches]]` and `[[queries]]` are written alike; `docs/plans.md` lists what each may hold.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet, read_data
from unmask.audit.cases.secrets import parse_secret
from unmask.audit.channels.axes import Axis
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.findings.gates import Gate, parse_gate
from unmask.displays import Displayed, Row
from unmask.errors import InputError
from unmask.protocols.table import parse_protocol
from unmask.wording import did_you_mean

_TOP = ("title", "gates", "time_limit", "data", *CHANNEL_AUDITS)
_LONGEST = 10**8  # seconds, three years: timers take no more


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """Cases in the order of the file, models together, and the data that they draw from."""

    path: Path
    text: str
    title: str
    cases: tuple[Case, ...]
    data: Mapping[str, DataSet]

    def display_rows(self) -> tuple[Row, Sequence[Row]]:
        """The title, and a row for each case."""
        cases = [(case["channel"], str(case)) for case in self.cases]
        return (f"Plan, {len(cases)} cases", self.title), cases

    @property
    def sha256(self) -> str:
        """The hash of the file."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    @property
    def models(self) -> list[str]:
        """Every model that is needed, once."""
        return list(dict.fromkeys(case["model"] for case in self.cases if case["model"]))

    def shard(self, number: int, count: int) -> tuple[Case, ...]:
        """Every count-th case, from the number-th on (1…count)."""
        if not 1 <= number <= count:
            raise InputError(f"--shard must be I/N with 1 ≤ I ≤ N, got {number}/{count}")
        return self.cases[number - 1 :: count]


def load_plan(path: str | Path) -> Plan:
    """Read a plan and its data; every mistake is found before anything runs."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except FileNotFoundError:
        raise InputError(f"there is no plan {path}; docs/plans.md shows how to write one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the plan {path} cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the plan {path} is not TOML: {error}; {_broken_line(str(error), text)}") from None
    try:
        return _plan(path, text, document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _broken_line(error: str, text: str) -> str:
    """The line that a message of the parser names, as it is written; the last one if it names none."""
    lines = text.rstrip().split("\n")
    found = re.search(r"line (\d+)", error)
    number = min(int(found[1]), len(lines)) if found else len(lines)
    line = lines[number - 1].strip()
    return f"line {number} is {line[:80]!r}{', where a quote is not closed' if line.count(chr(34)) % 2 else ''}"


def _plan(path: Path, text: str, document: Mapping[str, Any]) -> Plan:
    if unknown := [key for key in document if key not in _TOP]:
        raise InputError(f"a plan has no '{unknown[0]}'.{did_you_mean(unknown[0], _TOP)} It may have {', '.join(_TOP)}")
    title = document.get("title", path.stem)
    data = document.get("data", {})
    if not isinstance(title, str) or not isinstance(data, Mapping):
        raise InputError("title must be a text, and data a table of tables, for example [data.notes]")
    data_sets = read_data(data, path.parent)
    default = _gates(document.get("gates", []), "gates")
    seconds = _time_limit(document.get("time_limit"), "time_limit")
    cases: dict[str, Case] = {}
    for channel in CHANNEL_AUDITS:
        groups = document.get(channel, [])
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            raise InputError(f"groups are written as [[{channel}]], with two brackets")
        for group, line in zip(groups, _lines_of(channel, text), strict=False):
            for case in _cases(channel, group, data_sets, default, seconds, line):
                cases[case.id] = _join(cases.get(case.id, case), case)
    if not cases:
        raise InputError(
            f"there is no case: write at least one of {', '.join(f'[[{channel}]]' for channel in CHANNEL_AUDITS)}"
        )
    models = {model: place for place, model in enumerate(dict.fromkeys(case["model"] for case in cases.values()))}
    ordered = sorted(cases.values(), key=lambda case: models[case["model"]])
    _refuse_idle_gates(ordered, default)
    return Plan(path, text, title, tuple(ordered), data_sets)


def _join(known: Case, case: Case) -> Case:
    """A case of two groups: the gates of both, and the longer time."""
    limits = (known.time_limit, case.time_limit)
    longer = None if None in limits else max(limit for limit in limits if limit is not None)
    return replace(known, gates=tuple(dict.fromkeys((*known.gates, *case.gates))), time_limit=longer)


def _cases(
    channel: str,
    group: Mapping[str, Any],
    data: Mapping[str, DataSet],
    default: tuple[Gate, ...],
    seconds: float | None,
    line: int,
) -> Iterator[Case]:
    """The product of a group's lists."""
    where = f"[[{channel}]] in line {line}"
    axes = CHANNEL_AUDITS[channel].axes
    allowed = (*axes, "gates", "time_limit")
    if unknown := [key for key in group if key not in allowed]:
        hint = did_you_mean(unknown[0], allowed)
        raise InputError(f"{where} has no '{unknown[0]}'.{hint} It may have {', '.join(allowed)}")
    gates = _gates(group["gates"], f"gates of {where}") if "gates" in group else default
    seconds = _time_limit(group.get("time_limit", seconds), f"time_limit of {where}")
    lists = [_entries(f"{name} of {where}", axis, group.get(name)) for name, axis in axes.items()]
    used: set[Gate] = set()
    for values in itertools.product(*lists):
        pairs = zip(axes.values(), values, strict=True)
        spec = {"channel": channel, **{axis.key: value for axis, value in pairs if not axis.is_left_out(value)}}
        over = [gate for gate in gates if _can_tell(gate, spec)]
        _require_steps(over, spec, where)
        used.update(over)
        yield Case(_check(spec, data, where), tuple(map(str, over)), line, seconds)
    if "gates" in group and (idle := [gate for gate in gates if gate not in used]):
        raise InputError(f"{where}: the gate '{idle[0]}' is about a metric that findings of this group do not have")


def _require_steps(gates: list[Gate], spec: Mapping[str, Any], where: str) -> None:
    """A gate on ε is about the whole training, so the plan must say how long that is."""
    if not any(gate.metric == "epsilon" for gate in gates):
        return
    protocol = parse_protocol(spec["protocol"])
    if protocol.name == "dpsgd" and protocol.settings["steps"] is None:
        raise InputError(
            f"{where}: ε is about the whole training; give its number of steps, for example dpsgd:steps=1000,…"
        )


def _can_tell(gate: Gate, spec: Mapping[str, Any]) -> bool:
    """Whether findings of a case have the metric of a gate; a hidden size has only the output layer."""
    hides_a_size = not gate.metric.startswith("hidden_size") or spec.get("secret") == "output-layer"
    return gate.concerns(spec["channel"]) and hides_a_size


def _check(spec: dict[str, Any], data: Mapping[str, DataSet], where: str) -> dict[str, Any]:
    """A specification whose parts fit together, with the hash of its data."""
    if "data" in spec:
        if spec["data"] not in data:
            hint = did_you_mean(spec["data"], data)
            raise InputError(f"{where}: there is no data '{spec['data']}'.{hint} The plan has {', '.join(data)}")
        found = data[spec["data"]]
        if spec["batch_size"] > len(found.texts):
            raise InputError(
                f"{where}: '{found.name}' has {len(found.texts)} texts, but batch_sizes has {spec['batch_size']}"
            )
        spec["data"] = {"name": found.name, "sha256": found.sha256}
    if fault := CHANNEL_AUDITS[spec["channel"]].find_fault(spec):
        raise InputError(f"{where}: {fault}")
    if spec["channel"] == "queries" and not parse_secret(spec["secret"]).needs_a_model:
        spec["model"] = ""
    return spec


def _entries(what: str, axis: Axis, given: Any) -> list[Any]:
    entries = list(axis.default) if given is None else given
    if not isinstance(entries, list) or not entries:
        seen = "nothing" if given is None else repr(given)
        raise InputError(f"{what}: expected a list with at least one entry, got {seen}")
    try:
        return [axis.read(entry) for entry in entries]
    except InputError as error:
        raise InputError(f"{what}: {error}") from None


def _gates(texts: Any, what: str) -> tuple[Gate, ...]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f'{what} must be a list of texts, for example ["no near-exact text", "rouge2 < 0.1"], got {texts!r}'
        )
    try:
        return tuple(parse_gate(text) for text in texts)
    except InputError as error:
        raise InputError(f"{what}: {error}") from None


def _time_limit(seconds: Any, what: str) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < _LONGEST:
        raise InputError(f"{what} must be a number of seconds above 0 and below {_LONGEST}, got {seconds!r}")
    return float(seconds)


def _refuse_idle_gates(cases: list[Case], default: tuple[Gate, ...]) -> None:
    """A gate that no case has would hold for ever."""
    used = {text for case in cases for text in case.gates}
    for gate in default:
        if str(gate) not in used:
            lines = sorted({case.line for case in cases if _can_tell(gate, case.spec)})
            todo = (
                f"the groups that measure {gate.metric} have gates of their own (line "
                f"{', '.join(map(str, lines))}): add it there"
                if lines
                else f"no group measures {gate.metric}: add one that does"
            )
            raise InputError(f"no case has the gate '{gate}': {todo}, or delete it from the top of the plan")


def _lines_of(channel: str, text: str) -> Iterator[int]:
    """The lines at which groups of a channel start."""
    header = re.compile(rf"\s*\[\[\s*{channel}\s*\]\]")
    yield from (number for number, line in enumerate(text.split("\n"), start=1) if header.match(line))
    yield from itertools.repeat(1)  # groups that are written in another way
