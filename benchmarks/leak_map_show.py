"""Tables and plots of the map of the leak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIGURE = Path(__file__).parent.parent / "docs" / "leak_map.svg"
Cell = dict[str, Any]


def show(cells: list[Cell]) -> None:
    """A Markdown table for each model and batch size; a figure if matplotlib is installed."""
    for model, count in sorted({(cell["model"], cell["texts"]) for cell in cells}):
        print(f"\n**{model}, {count} texts**\n")
        print("| protocol | defence | cosine | tokens: precision / recall | texts exact | ROUGE-2 | status |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for cell in cells:
            if (cell["model"], cell["texts"]) == (model, count):
                print(row(cell))
    try:
        plot(cells)
    except ImportError:
        print("\n(no figure: pip install 'unmask[plots]')")


def row(cell: Cell) -> str:
    """One line of the table."""
    precision = "–" if cell["token_precision"] is None else f"{cell['token_precision']:.2f}"
    budget = "" if cell["epsilon"] is None else f" (ε = {cell['epsilon']:.3g})"
    return (
        f"| {cell['protocol']}{budget} | {cell['defence'] or 'none'} | {cell['cosine']:.3f} "
        f"| {precision} / {cell['token_recall']:.2f} | {cell['exact']:.2f} | {cell['rouge2']:.2f} | {cell['status']} |"
    )


def plot(cells: list[Cell]) -> None:
    """Token recall and exact texts against the strength of Gaussian noise and of DP-SGD."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    families = (
        ("noise:sigma=", "defence", "σ of Gaussian noise"),
        ("noise_multiplier=", "protocol", "noise multiplier"),
    )
    for axis, (key, field, label) in zip(axes, families, strict=True):
        for model, count in sorted({(cell["model"], cell["texts"]) for cell in cells}):
            chosen = [c for c in cells if (c["model"], c["texts"]) == (model, count) and key in c[field]]
            points = sorted(
                (float(c[field].split(key)[1].split(",")[0]), c["token_recall"], c["exact"]) for c in chosen
            )
            if points:
                strength, recall, exact = zip(*points, strict=True)
                (line,) = axis.plot(strength, recall, marker="o", label=f"{model}, {count} texts: tokens")
                axis.plot(strength, exact, marker="s", linestyle=":", color=line.get_color(), label="whole texts")
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share recovered")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)
    print(f"\nfigure: {FIGURE}")
