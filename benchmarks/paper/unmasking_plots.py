"""Plots of docs/paper-unmasking.md as SVG; the same results give the same files."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_plots(parts: dict[str, list[dict]], folder: Path, stem: str) -> list[str]:
    """One file for each part that has rows and a plot; none without matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        return []
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unmask"
    from matplotlib import pyplot

    names = []
    for part, draw in _DRAWINGS.items():
        if parts.get(part):
            figure = draw(parts[part], pyplot)
            names.append(f"{stem}_{part}.svg")
            figure.savefig(folder / names[-1], bbox_inches="tight", metadata={"Date": None})
            pyplot.close(figure)
    return names


def _stacks(rows: Sequence[dict], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    kinds = dict.fromkeys((row["n"], row["d"], row["sharpness"]) for row in rows)
    for place, kind in enumerate(kinds):
        chosen = [row for row in rows if (row["n"], row["d"], row["sharpness"]) == kind]
        name = f"{kind[0]} × {kind[1]}, s = {kind[2]:g}"
        for column, line in (("median_error", "o-"), ("median_radius", "s--")):
            points = [(row["layers"], row[column]) for row in chosen if math.isfinite(row[column])]
            label = name if column == "median_error" else None
            axes.plot([x for x, _ in points], [y for _, y in points], line, color=f"C{place}", label=label)
    axes.set(yscale="log", xlabel="layers", ylabel="median error of X (solid: relative)\nand proved radius (dashed)")
    axes.set_xticks(sorted({row["layers"] for row in rows}))
    axes.legend(fontsize=8)
    return figure


def _sensitivity(rows: Sequence[dict], pyplot: Any) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axes, name in zip(panels, ("W", "V"), strict=True):
        chosen = [row for row in rows if row["wrong"] == name]
        levels = [row["level"] for row in chosen]
        for column, line, label in (
            ("worst_case", "--", "‖J⁻¹‖‖δ‖"),
            ("first_order", "-", "first order, ‖J⁻¹δ‖"),
            ("error", "o", "measured"),
        ):
            axes.plot(levels, [row[column] for row in chosen], line, label=label)
        axes.set(xscale="log", yscale="log", xlabel=f"relative error of {name}")
    panels[0].set_ylabel("relative error of X")
    panels[0].legend(fontsize=8)
    return figure


def _bounds(rows: Sequence[dict], pyplot: Any) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6))
    n = sorted({row["n"] for row in rows})[-1]
    chosen = [row for row in rows if row["n"] == n]
    radii = [row["R"] for row in chosen]
    lines = (
        (0, "negative_eigenvalue", "o-", "seen, −λ_min/2"),
        (0, "our_gamma", "-", "our γ"),
        (0, "paper_gamma", "--", "Lemma 4.5, n·d·R⁸"),
        (1, "hessian_change", "o-", "seen, ‖Δ∇²L‖/‖ΔX‖"),
        (1, "our_lipschitz", "-", "our constant"),
        (1, "paper_lipschitz", "--", "Lemma 4.4, n³d³R¹⁰"),
    )
    for panel, column, line, label in lines:
        panels[panel].plot(radii, [row[column] for row in chosen], line, label=label)
    for axes in panels:
        axes.set(xscale="log", yscale="log", xlabel=f"R, n = {n}, d = {chosen[0]['d']}")
        axes.legend(fontsize=8)
    return figure


def _indefinite(rows: Sequence[dict], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    kinds = list(dict.fromkeys((row["n"], row["d"], row["sharpness"], row["causal"]) for row in rows))
    width = 0.8 / len(ways)
    for place, way in enumerate(ways):
        cells = {(row["n"], row["d"], row["sharpness"], row["causal"]): row for row in rows if row["way"] == way}
        points = [(kinds.index(kind), row["input_found"] / row["problems"]) for kind, row in cells.items()]
        axes.bar(
            [x + (place - len(ways) / 2 + 0.5) * width for x, _ in points], [y for _, y in points], width, label=way
        )
    labels = [f"{n}×{d}\n" + ("causal" if causal else f"s = {s:g}") for n, d, s, causal in kinds]
    axes.set_xticks(range(len(kinds)), labels, fontsize=7)
    axes.set(ylabel="share of inputs found", ylim=(0, 1.05))
    axes.legend(fontsize=8)
    return figure


_DRAWINGS = {"stacks": _stacks, "sensitivity": _sensitivity, "bounds": _bounds, "indefinite": _indefinite}
