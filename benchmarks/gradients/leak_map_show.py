"""Tables and plots of the map of the leak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURE = Path(__file__).parents[2] / "docs" / "leak_map.svg"
CHANCE = 0.01  # of the tokens: what a guess of as many tokens as a batch has would get, and more
Cell = dict[str, Any]


def show(cells: list[Cell], draw: bool = True) -> None:
    """The map, DAGER beside it where noise was added, the budget at which nothing is left; a figure if possible."""
    for part in (leak_table(cells), noise_table(cells), budgets(cells)):
        print("\n".join(["", *part]))
    if not draw:
        return
    try:
        plot(cells)
    except ImportError:
        print("\n(no figure: pip install 'unmask[plots]')")


def groups(cells: Sequence[Cell]) -> list[tuple[str, int]]:
    """Models and batch sizes."""
    return sorted({(cell["model"], cell["texts"]) for cell in cells})


def leak_table(cells: Sequence[Cell]) -> list[str]:
    """One line for each protocol and defence: what it costs the update, and what is left of texts and tokens."""
    columns = groups(cells)
    by_key = {(c["protocol"], c["defence"], c["model"], c["texts"]): c for c in cells}
    lines = [
        f"| client | defence | cosine | {' | '.join(f'{model}, {count} texts' for model, count in columns)} |",
        f"| --- | --- | --: | {' | '.join('---' for _ in columns)} |",
    ]
    for protocol, defence in dict.fromkeys((c["protocol"], c["defence"]) for c in cells):
        row = [by_key.get((protocol, defence, *column)) for column in columns]
        held = [cell for cell in row if cell is not None]
        told = " | ".join("" if cell is None else leak(cell) for cell in row)
        cost = _range([cell["cosine"] for cell in held], ".2f") if defence else ""
        budgets = [cell["epsilon"] for cell in held if cell["epsilon"] is not None]
        client = f"`{protocol}`" + (f" (ε {_range(budgets, '.2g')})" if budgets else "")
        lines.append(f"| {client} | {f'`{defence}`' if defence else 'none'} | {cost} | {told} |")
    return lines


def leak(cell: Cell) -> str:
    """Texts and tokens of a cell, in words."""
    if cell["token_precision"] is None:
        return f"nothing ({cell['status'].replace('_', ' ').lower()})"
    certain = cell["certain"] - cell["false_certain"]
    precision = "" if cell["token_precision"] == 1 else f", precision {cell['token_precision']:.2f}"
    texts = f"**all texts** ({certain})" if cell["status"] == "RECOVERED" else f"{certain} texts"
    guessed = round(cell["exact"] * cell["texts"] * _num_clients(cell)) - certain
    also = f" ({guessed} more guessed right)" if guessed > 0 else ""
    return f"{texts if certain else 'no text'}{also}, {100 * cell['token_recall']:.0f} % of tokens{precision}"


def _num_clients(cell: Cell) -> int:
    return int(cell["defence"].rpartition("clients=")[2]) if "clients=" in cell["defence"] else 1


def _range(numbers: Sequence[float], style: str) -> str:
    """The least and the largest, or one of them where they look the same."""
    return "–".join(dict.fromkeys(format(number, style) for number in (min(numbers), max(numbers))))


def noise_table(cells: Sequence[Cell]) -> list[str]:
    """Gaussian noise: the share of the tokens that DAGER's token sets hold, and ours, on the same update."""
    noisy = [cell for cell in cells if cell["defence"].startswith("noise:") or cell["defence"] == ""]
    noisy = [cell for cell in noisy if cell["protocol"] == "fedsgd"]
    columns = groups(noisy)
    lines = [
        f"| σ | {' | '.join(f'{model}, {count} texts: DAGER as published / ours' for model, count in columns)} |",
        f"| --- | {' | '.join('--:' for _ in columns)} |",
    ]
    for defence in dict.fromkeys(cell["defence"] for cell in noisy):
        row = {(c["model"], c["texts"]): c for c in noisy if c["defence"] == defence}
        shares = [f"{c['dager_recall']:.2f} / {c['token_recall']:.2f}" for c in (row[k] for k in columns if k in row)]
        lines.append(f"| {defence.removeprefix('noise:sigma=') or '0'} | {' | '.join(shares)} |")
    return lines


def budgets(cells: Sequence[Cell]) -> list[str]:
    """The largest ε of DP-SGD at which no more than chance is left, and the smallest at which more is."""
    lines = []
    for model, count in groups(cells):
        private = [c for c in cells if (c["model"], c["texts"]) == (model, count) and c["epsilon"] is not None]
        blind = [c["epsilon"] for c in private if c["token_recall"] <= CHANCE]
        telling = [c["epsilon"] for c in private if c["token_recall"] > CHANCE]
        if blind and telling:
            lines.append(f"- {model}, {count} texts: chance at ε = {max(blind):.3g}, more at ε = {min(telling):.3g}")
    return lines


def plot(cells: list[Cell]) -> None:
    """Token recall and exact texts against the strength of Gaussian noise and of DP-SGD."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unmask"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    families = (
        ("noise:sigma=", "defence", "σ of Gaussian noise on every entry"),
        ("noise_multiplier=", "protocol", "noise multiplier of DP-SGD (clipping norm 1)"),
    )
    for axis, (key, field, label) in zip(axes, families, strict=True):
        for model, count in groups(cells):
            chosen = [c for c in cells if (c["model"], c["texts"]) == (model, count) and key in c[field]]
            points = sorted(
                (float(c[field].split(key)[1].split(",")[0]), c["token_recall"], c["exact"]) for c in chosen
            )
            if points:
                strength, recall, exact = zip(*points, strict=True)
                (line,) = axis.plot(strength, recall, marker="o", label=f"{model}, {count} texts: tokens")
                axis.plot(strength, exact, marker="s", linestyle=":", color=line.get_color(), label="whole texts")
        axis.axhline(CHANCE, color="grey", linewidth=0.8)
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
