"""Curves: how much leaks against batch size, noise and ε. Everything but x and the seed is equal along a line."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unmask.audit.cases.case_names import KEYS, SEPARATOR, setting
from unmask.audit.findings.finding import ERROR, Finding, Outcome
from unmask.metrics import METRICS
from unmask.report.numbers import interval, number

MAX_LINES = 5  # in one chart; more are split over several
MAX_CHARTS = 24
_METRICS = ("token_recall", "exact_rate", "weights_rate", "inputs_rate")
_VARIED = "…"  # stands for the setting that is varied along a line
_NOISE = re.compile(r"(noise|laplace):(?:(.*),)?sigma=([^,]+)(.*)")
_DPSGD = re.compile(r"dpsgd:(?:(.*),)?noise_multiplier=([^,]+)(.*)")

Case = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """All seeds at one x. Low and high are None with a single seed.

    Of the runs that have a value, `num_unclear` are inconclusive; `num_lost` more raised or were not run.
    """

    x: float
    mean: float
    low: float | None
    high: float | None
    chance: float | None
    num_runs: int
    num_unclear: int
    num_lost: int = 0

    @property
    def is_open(self) -> bool:
        """Whether a low value means less than it seems to."""
        return self.num_unclear > 0 or self.num_lost > 0


@dataclass(frozen=True)
class Line:
    """The leak of one setting along x, with what is not drawn: places without any value, and cases under no gate."""

    name: str
    points: tuple[Point, ...]
    empty: tuple[tuple[float, int], ...] = ()  # x, and the runs that were lost there
    num_ungated: int = 0


@dataclass(frozen=True)
class ChartAxis:
    """What is varied. `place` finds x and the case with x taken out; `bare` is that case without the defence."""

    name: str
    title: str
    place: Callable[[Finding], tuple[float, Case] | None]
    bare: Callable[[Case], Case | None] = lambda case: None
    bare_x: float = 0.0


@dataclass(frozen=True)
class Chart:
    """Lines that share an axis, a metric and a channel."""

    axis: ChartAxis
    metric: str
    channel: str
    lines: tuple[Line, ...]
    part: str = ""  # where lines are split over several charts

    @property
    def title(self) -> str:
        """What against what."""
        return f"{METRICS[self.metric].title} against {self.axis.name}{self.part}"

    @property
    def seeds(self) -> tuple[int, int]:
        """The fewest and the most runs of a point."""
        counts = [point.num_runs for line in self.lines for point in line.points]
        return min(counts), max(counts)


def charts_of(
    findings: Sequence[Finding], missing: Sequence[Mapping[str, Any]] = (), gated: Collection[str] = ()
) -> list[Chart]:
    """Every chart that has a line with at least two x-values.

    `missing` are cases that were not run. `gated` are ids of cases under a gate: beside two x-values that are, those
    under no gate are left out, since controls lie far away.
    """
    lost = [Finding("", case, ERROR, "not run") for case in missing]
    charts = []
    for axis in AXES:
        for metric in _METRICS:
            known = [finding for finding in findings if number(finding.metrics, metric) is not None]
            raised = [finding for finding in findings if finding.status == ERROR]
            lines = _lines(axis, metric, known, [*raised, *lost], gated)
            for channel in sorted({str(case.get("channel")) for case, _ in lines}):
                charts += _charts(axis, metric, channel, [line for line in lines if line[0].get("channel") == channel])
    return charts


def _charts(axis: ChartAxis, metric: str, channel: str, lines: list[tuple[Case, Line]]) -> list[Chart]:
    names = _names([case for case, _ in lines])
    named = [replace(line, name=name) for name, (_, line) in zip(names, lines, strict=True)]
    parts = [tuple(named[start : start + MAX_LINES]) for start in range(0, len(named), MAX_LINES)]
    return [
        Chart(axis, metric, channel, part, f" ({number} of {len(parts)})" if len(parts) > 1 else "")
        for number, part in enumerate(parts, start=1)
    ]


def _lines(
    axis: ChartAxis, metric: str, known: Sequence[Finding], lost: Sequence[Finding], gated: Collection[str]
) -> list[tuple[Case, Line]]:
    """Lines without their names."""
    groups: dict[str, tuple[Case, dict[float, list[Finding]]]] = {}
    unplaced: dict[str, list[Finding]] = defaultdict(list)
    for finding in known:
        placed = axis.place(finding)
        if placed is None:
            unplaced[_key(_seedless(finding.case))].append(finding)
        else:
            x, case = placed
            groups.setdefault(_key(case), (case, defaultdict(list)))[1][x].append(finding)
    lines = []
    for key, (case, places) in groups.items():
        bare = axis.bare(case)
        if bare is not None and axis.bare_x not in places and (without := unplaced.get(_key(bare))):
            places[axis.bare_x] = without
        places, num_ungated = _select_gated(places, gated, None if bare is None else axis.bare_x)
        if len(places) >= 2:
            counts = _lost(axis, key, places, lost)
            points = tuple(_point(x, metric, places[x], counts.get(x, 0)) for x in sorted(places))
            empty = tuple((x, count) for x, count in sorted(counts.items()) if x not in places)
            lines.append((case, Line("", points, empty, num_ungated)))
    return lines


def _select_gated(
    places: Mapping[float, list[Finding]], gated: Collection[str], bare_x: float | None
) -> tuple[dict[float, list[Finding]], int]:
    """The places under a gate if there are two of them, else all; and the number of findings that are left out."""
    kept = {x: [one for one in found if one.id in gated or x == bare_x] for x, found in places.items()}
    kept = {x: found for x, found in kept.items() if found}
    if len(kept) < 2 or not any(one.id in gated for found in kept.values() for one in found):
        return dict(places), 0
    return kept, sum(map(len, places.values())) - sum(map(len, kept.values()))


def _lost(axis: ChartAxis, key: str, places: Mapping[float, list[Finding]], lost: Sequence[Finding]) -> Counter[float]:
    """Cases of a line that have no value, by x: as the axis places them, or beside the same case with another seed."""
    homes = {_key(_seedless(finding.case)): x for x, found in places.items() for finding in found}
    counts: Counter[float] = Counter()
    for finding in lost:
        placed = axis.place(finding)
        x = homes.get(_key(_seedless(finding.case)))
        if x is None and placed is not None and _key(placed[1]) == key:
            x = placed[0]
        if x is not None:
            counts[x] += 1
    return counts


def _point(x: float, metric: str, findings: Sequence[Finding], num_lost: int) -> Point:
    values = [float(finding.metrics[metric]) for finding in findings]
    chances = [chance for finding in findings if (chance := number(finding.chance, metric)) is not None]
    low, high = interval(values) or (None, None)
    unclear = sum(finding.outcome is Outcome.INCONCLUSIVE for finding in findings)
    chance = sum(chances) / len(chances) if chances else None
    return Point(x, sum(values) / len(values), low, high, chance, len(values), unclear, num_lost)


def _names(cases: Sequence[Case]) -> list[str]:
    """Names of lines: the model, and what tells them apart."""
    keys = dict.fromkeys(("model", *KEYS, *(key for case in cases for key in case)))
    telling = [key for key in keys if key == "model" or len({_key(case.get(key)) for case in cases}) > 1]
    return [SEPARATOR.join(setting(key, case[key]) for key in telling if case.get(key)) for case in cases]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _seedless(case: Mapping[str, Any]) -> Case:
    return {key: value for key, value in case.items() if key != "seed"}


def _finite(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


# Axes


def _by_batch(finding: Finding) -> tuple[float, Case] | None:
    case = _seedless(finding.case)
    size = _finite(case.pop("batch_size", None))
    return None if size is None else (size, case)


def _by_noise(relative: bool) -> Callable[[Finding], tuple[float, Case] | None]:
    def place(finding: Finding) -> tuple[float, Case] | None:
        case = _seedless(finding.case)
        defences = [str(defence) for defence in case.get("defences") or ()]
        for index, defence in enumerate(defences):
            match = _NOISE.fullmatch(defence)
            if match is None or ("relative=true" in defence) != relative:
                continue
            sigma = _finite(match[3])
            if sigma is None:
                return None
            before = f"{match[2]}," if match[2] else ""
            defences[index] = f"{match[1]}:{before}sigma={_VARIED}{match[4]}"
            return sigma, {**case, "defences": defences}
        return None

    return place


def _without_noise(case: Case) -> Case:
    return {**case, "defences": [defence for defence in case["defences"] if f"sigma={_VARIED}" not in defence]}


def _private(finding: Finding) -> tuple[float, Case] | None:
    """The noise multiplier of DP-SGD, and the case with it taken out."""
    case = _seedless(finding.case)
    match = _DPSGD.fullmatch(str(case.get("protocol")))
    multiplier = None if match is None else _finite(match[2])
    if match is None or multiplier is None:
        return None
    before = f"{match[1]}," if match[1] else ""
    return multiplier, {**case, "protocol": f"dpsgd:{before}noise_multiplier={_VARIED}{match[3]}"}


def _by_epsilon(finding: Finding) -> tuple[float, Case] | None:
    placed, epsilon = _private(finding), number(finding.metrics, "epsilon")
    if placed is None or epsilon is None:
        return None
    return float(f"{epsilon:.3g}"), placed[1]


def _plain_sgd(case: Case) -> Case:
    return {**case, "protocol": "fedsgd"}


AXES = (
    ChartAxis("batch size", "texts in the batch", _by_batch),
    ChartAxis("noise", "standard deviation σ of the noise", _by_noise(relative=False), _without_noise),
    ChartAxis(
        "relative noise", "σ of the noise, in units of each tensor's rms", _by_noise(relative=True), _without_noise
    ),
    # Without noise DP-SGD still clips, so plain FedSGD is no point of this axis.
    ChartAxis("DP-SGD's noise", "noise multiplier of DP-SGD", _private),
    ChartAxis("ε", "privacy budget ε of DP-SGD (small is private)", _by_epsilon, _plain_sgd, math.inf),
)
