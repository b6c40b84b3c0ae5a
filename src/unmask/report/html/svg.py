"""Charts as inline SVG. Colours come from the page's style sheet; every line has a marker of its own shape as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup, escape

from unmask.report.html.curves import Chart, Line, Point
from unmask.report.numbers import percent, scientific

WIDTH, HEIGHT = 560, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 18, 14, 50
_SLOT = 58  # room for a tick of its own: 'none' on the left, '∞' on the right
_TICK_ROOM = 54  # in letters that a phone can show
_DECADE = 10.0


class Scale:
    """x to pixels: logarithmic where values span a decade or more; 0 and ∞ have places of their own."""

    def __init__(self, values: Sequence[float]) -> None:
        self.inner = sorted({value for value in values if 0 < value < math.inf})
        self.has_zero, self.has_infinity = 0.0 in values, math.inf in values
        self.is_log = bool(self.inner) and self.inner[-1] / self.inner[0] >= _DECADE
        self._start = _LEFT + 22 + (_SLOT if self.has_zero else 0)
        self._end = WIDTH - _RIGHT - 22 - (_SLOT if self.has_infinity else 0)

    def __call__(self, x: float) -> float:
        if x == 0:
            return _LEFT + 22
        if x == math.inf:
            return WIDTH - _RIGHT - 22
        low, high = (self._map(self.inner[0]), self._map(self.inner[-1]))
        share = 0.5 if low == high else (self._map(x) - low) / (high - low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels; labels that would touch are left out."""
        ticks = [(self(0), "none")] if self.has_zero else []
        for value in self.inner:
            if not ticks or self(value) - ticks[-1][0] >= _TICK_ROOM:
                ticks.append((self(value), scientific(value)))
        return ticks + ([(self(math.inf), "∞")] if self.has_infinity else [])

    def _map(self, x: float) -> float:
        return math.log(x) if self.is_log else x


def draw(chart: Chart, number: int) -> Markup:
    """The chart; `number` makes the ids of its title and description unique on the page."""
    scale = Scale([point.x for line in chart.lines for point in line.points])
    parts = [
        f'<title id="c{number}t">{escape(chart.title)}</title>',
        f'<desc id="c{number}d">{escape(describe(chart))}</desc>',
        *_frame(chart, scale),
        *_chances(chart.lines, scale),
    ]
    for index, line in enumerate(chart.lines):
        parts += _line(line, index, (index - (len(chart.lines) - 1) / 2) * 4, scale)
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="c{number}t c{number}d">'
    return Markup(head + "".join(parts) + "</svg>")


def describe(chart: Chart) -> str:
    """The chart in words, for those who do not see it."""
    lines = "; ".join(
        f"{line.name}: from {percent(line.points[0].mean)} at {_x(line.points[0].x)} to "
        f"{percent(line.points[-1].mean)} at {_x(line.points[-1].x)}"
        for line in chart.lines
    )
    return f"{chart.axis.title} on the horizontal axis. {lines}. The numbers are in the table below the figure."


def marker(index: int, x: float, y: float, is_hollow: bool = False) -> Markup:
    """A marker whose shape tells lines apart without colour; hollow where a run is inconclusive."""
    kind = f'class="m c{index}{" hollow" if is_hollow else ""}"'
    shapes = (
        f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
        f'<rect {kind} x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path {kind} d="M{x:.1f} {y - 5.8:.1f}l5.8 5.8-5.8 5.8-5.8-5.8z"/>',
        f'<path {kind} d="M{x:.1f} {y - 5.4:.1f}l5.4 9.6h-10.8z"/>',
        f'<path {kind} d="M{x:.1f} {y + 5.4:.1f}l5.4-9.6h-10.8z"/>',
    )
    return Markup(shapes[index % len(shapes)])


def _frame(chart: Chart, scale: Scale) -> list[str]:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _y(share)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent(share)}</text>')
    floor = _y(0)
    for x, label in scale.ticks():
        parts.append(f'<path class="axis" d="M{x:.1f} {floor:.1f}v5"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 19:.1f}" text-anchor="middle">{escape(label)}</text>')
    middle = WIDTH / 2
    kind = ", logarithmic" if scale.is_log else ""
    title = f"{chart.axis.title}{kind}"
    parts.append(f'<text class="name" x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(title)}</text>')
    return parts


def _line(line: Line, index: int, shift: float, scale: Scale) -> list[str]:
    places = [(scale(point.x) + shift, _y(point.mean), point) for point in line.points]
    parts = []
    for (x0, y0, before), (x1, y1, after) in pairwise(places):
        unclear = " dotted" if before.is_open or after.is_open else ""
        parts.append(f'<path class="line c{index}{unclear}" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>')
    for x, y, point in places:
        if point.low is not None and point.high is not None:
            low, high = _y(point.low), _y(point.high)
            parts.append(
                f'<path class="bar c{index}" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8'
                f'M{x - 4:.1f} {high:.1f}h8"/>'
            )
        parts.append(f"<g><title>{escape(_tooltip(line, point))}</title>{marker(index, x, y, point.is_open)}</g>")
    return parts


def chance_legend(lines: Sequence[Line]) -> list[tuple[Markup, str]]:
    """Samples of the dashed lines: one for all, or one for each line in its colour."""
    if not any(_chance_places(line) for line in lines):
        return []
    if _is_shared(lines):
        return [(Markup('<path class="chance" d="M0 8h16"/>'), "chance")]
    return [
        (Markup(f'<path class="chance own c{index}" d="M0 8h16"/>'), f"chance of {line.name}")
        for index, line in enumerate(lines)
        if _chance_places(line)
    ]


def _chances(lines: Sequence[Line], scale: Scale) -> list[str]:
    """Chance as dashed lines in the colours of their lines; where all lines have the same, there is one."""
    if _is_shared(lines):
        joined = sorted({place for line in lines for place in _chance_places(line)})
        return [f'<path class="chance" d="{_path(joined, scale)}"/>'] if joined else []
    return [
        f'<path class="chance own c{index}" d="{_path(places, scale)}"/>'
        for index, line in enumerate(lines)
        if (places := _chance_places(line))
    ]


def _chance_places(line: Line) -> list[tuple[float, float]]:
    return [(point.x, round(point.chance, 3)) for point in line.points if point.chance is not None]


def _is_shared(lines: Sequence[Line]) -> bool:
    places = {place for line in lines for place in _chance_places(line)}
    return len({x for x, _ in places}) == len(places)


def _path(places: Sequence[tuple[float, float]], scale: Scale) -> str:
    steps = [f"{scale(x):.1f} {_y(chance):.1f}" for x, chance in places]
    return f"M{'L'.join(steps)}"


def _tooltip(line: Line, point: Point) -> str:
    unclear = f", {point.num_unclear} of {point.num_runs} inconclusive" if point.num_unclear else ""
    lost = f", {point.num_lost} more failed or not run" if point.num_lost else ""
    return f"{line.name}, {_x(point.x)}: {percent(point.mean)}{unclear}{lost}"


def _x(x: float) -> str:
    return "none" if x == 0 else scientific(x)


def _y(share: float) -> float:
    return _TOP + (1 - min(max(share, 0.0), 1.0)) * (HEIGHT - _TOP - _BOTTOM)
