"""Figures for notebooks and papers: curves of an audit, and the spectrum that decides how many tokens are seen.

    unmask.plot.plot_curves(unmask.read_audit("runs/audit"))     # the charts of the report
    unmask.plot.plot_spectrum(evidence, model)                   # singular values of the first block's gradients

Each returns a matplotlib figure, which notebooks show and `savefig` writes. Needs the extra `plots`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from unmask.attacks.gradients.sites import first_input_site, prefix_sites
from unmask.audit.findings.folder import Audit
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.report.html.curves import Chart, charts_of
from unmask.safe_text import make_safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 2
_SIZE = (6.0, 3.4)  # inches, of one chart
_FLOOR = 1e-12  # of the largest singular value: below, nothing is drawn
_MARKERS = "osD^v"


def plot_curves(audit: Audit) -> Figure:
    """How much leaks against batch size, noise and ε: one chart for each axis and measure of the audit."""
    charts = charts_of(audit.findings)
    if not charts:
        raise InputError(
            "no setting of this audit has two values to draw a line through; vary batch_sizes or a defence"
        )
    rows = math.ceil(len(charts) / _COLUMNS)
    figure = _new_figure(_SIZE[0] * min(len(charts), _COLUMNS), _SIZE[1] * rows)
    for number, chart in enumerate(charts, 1):
        _draw_chart(figure.add_subplot(rows, min(len(charts), _COLUMNS), number), chart)
    return figure


def plot_spectrum(evidence: GradientEvidence, model: Model) -> Figure:
    """Singular values of the gradients that tell tokens and prefixes apart; a dashed line at the rank of each.

    A steep fall is what makes an attack exact: on its left are the inputs, on its right is rounding. Where there is no
    fall before the width, every token passes, and the span tells nothing.
    """
    first = first_input_site(evidence, model)
    sites = [*([] if first is None else [first]), *prefix_sites(evidence, model)]
    if not sites:
        raise InputError("this update holds no gradient of the first block; capture its attention and MLP weights")
    figure = _new_figure(*_SIZE)
    axes = figure.add_subplot()
    for site in sites:
        values = site.span.singular_values.double().cpu()
        relative = (values / values.max().clamp_min(1e-300)).clamp_min(_FLOOR)
        (line,) = axes.semilogy(
            range(1, len(values) + 1), relative.tolist(), label=f"{site.name}: rank {site.span.rank}"
        )
        axes.axvline(site.span.rank + 0.5, color=line.get_color(), linestyle="--", linewidth=0.8)
    axes.set(xlabel="number of the singular value", ylabel="relative to the largest", title="Spectrum of the update")
    axes.legend(frameon=False, fontsize="small")
    return figure


def _draw_chart(axes: Any, chart: Chart) -> None:
    """Means with their intervals; hollow where some runs are inconclusive or lost: low means less there."""
    for index, line in enumerate(chart.lines):
        points = [point for point in line.points if math.isfinite(point.x)]
        x, means = [point.x for point in points], [point.mean for point in points]
        below = [point.mean - point.low if point.low is not None else 0.0 for point in points]
        above = [point.high - point.mean if point.high is not None else 0.0 for point in points]
        drawn = axes.errorbar(x, means, yerr=[below, above], capsize=3, label=_plain(line.name, 60))
        for point in points:
            fill = "white" if point.is_open else drawn.lines[0].get_color()
            style = {"color": drawn.lines[0].get_color(), "markerfacecolor": fill}
            axes.plot([point.x], [point.mean], _MARKERS[index % len(_MARKERS)], **style)
    positive = [point.x for line in chart.lines for point in line.points if 0 < point.x < math.inf]
    if positive and max(positive) >= 10 * min(positive):
        axes.set_xscale("symlog", linthresh=min(positive))
    axes.set(xlabel=chart.axis.title, ylim=(-0.03, 1.03), title=_plain(chart.title, 90))
    axes.legend(frameon=False, fontsize="small")


def _plain(text: str, longest: int) -> str:
    """Hostile text made harmless, and without the sign that matplotlib takes for formulas."""
    return make_safe(text, longest).replace("$", r"\$")


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("figures need matplotlib; run: pip install 'unmask[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")
