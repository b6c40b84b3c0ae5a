"""Plots of Figures 2 to 4 from stored points; needs matplotlib."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result_lines import Result

FIGURES = {
    "fig2": (
        "Figure 2: tokens that pass the span tests",
        "GPT-2 base shape, SST-2, 32 texts: tokens of the vocabulary that pass at the first position, against the "
        "tolerance. Dashed: how many of the batch's own first tokens are among them. In the paper: 32 texts of 391 "
        "tokens; fewer than 300 tokens pass block 0 over a wide range of tolerances, and with block 1 exactly the 32 "
        "first tokens are left.",
    ),
    "fig3": (
        "Figure 3: the rank cut near the width",
        "GPT-2 base shape, 4 long texts (sentences of SST-2 joined; the paper has ECHR): ROUGE-1 against the tokens in "
        "the batch, for rank margins. The width is 768.",
    ),
    "fig4": (
        "Figure 4: an encoder's texts against their length",
        "MiniLM-L6, real weights, 4 texts: texts found and seconds a batch. DAGER checks at most 100,000 products for "
        "an end token here; without heuristics the number of texts is not told.",
    ),
    "long": (
        "A text of 512 tokens",
        "GPT-2 base shape, one text, sentences of SST-2 joined. In the paper (section 6): texts of ECHR cut to 512 "
        "tokens, one in a batch; DAGER 100.0 ± 0.0 / 100.0 ± 0.0, LAMP 10.1 ± 2.3 ROUGE-1.",
    ),
}


def draw_figures(points: Sequence[Result], page: Path) -> dict[str, str]:
    """Draw what there are points for beside the page; figure → what the page shows of it."""
    by_figure: defaultdict[str, list[Result]] = defaultdict(list)
    for point in points:
        by_figure[point["spec"]["figure"]].append(point)
    drawn = {}
    for figure, draw in {"fig2": _draw_2, "fig3": _draw_3, "fig4": _draw_4}.items():
        if by_figure[figure]:
            file = page.with_name(f"paper_dager_{figure}.svg")
            draw(by_figure[figure], file)
            machines = sorted({point["machine"] for point in by_figure[figure]})
            drawn[figure] = f"![{FIGURES[figure][0]}]({file.name})\n\nMachine: {'; '.join(machines)}."
    if by_figure["fig2"]:
        drawn["fig2"] += "\n\n" + "\n".join(map(_tolerance_line, by_figure["fig2"]))
    if by_figure["long"]:
        drawn["long"] = "\n".join(map(_long_line, by_figure["long"]))
    return drawn


def _tolerance_line(point: Result) -> str:
    """A batch of Figure 2 in words, as the paper has its own."""
    first = _range(point, point["pass_first"], point["found_first"])
    second = _range(point, point["pass_second"], point["found_second"])
    return (
        f"- Ours: {point['spec']['texts']} texts, rank {point['rank']}, {point['num_held']} different first tokens. "
        f"All of them are among the {first} that pass block 0, and among the {second} that pass block 1."
    )


def _range(point: Result, passing: Sequence[int], found: Sequence[int]) -> str:
    """The fewest tokens that pass while none of the batch is lost, and at which tolerances."""
    whole = [i for i, held in enumerate(found) if held == point["num_held"]]
    fewest = min((passing[i] for i in whole), default=0)
    where = [f"{point['tolerances'][i]:g}" for i in whole if passing[i] == fewest]
    return f"{fewest} tokens (tolerance {' to '.join(dict.fromkeys((where[0], where[-1])))})" if where else "no tokens"


def _long_line(point: Result) -> str:
    settings = f" ({point['spec']['settings']})" if point["spec"]["settings"] else ""
    return (
        f"- {point['spec']['attack']}{settings}: ROUGE {100 * point['rouge1']:.1f} / {100 * point['rouge2']:.1f}, "
        f"{point['exact']} of {point['num_texts']} exact, {point['seconds']:.1f} s; {point['machine']}"
    )


def _draw_2(points: Sequence[Result], file: Path) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for block, name in (("first", "block 0"), ("second", "block 1")):
        tolerances = points[0]["tolerances"]
        passing = [statistics.fmean(p[f"pass_{block}"][i] for p in points) for i in range(len(tolerances))]
        found = [statistics.fmean(p[f"found_{block}"][i] for p in points) for i in range(len(tolerances))]
        (line,) = axes.plot(tolerances, passing, "o-", label=f"{name}: all that pass")
        axes.plot(tolerances, found, "x--", color=line.get_color(), label=f"{name}: of the batch")
    axes.set(xscale="log", yscale="symlog", xlabel="tolerance", ylabel="tokens at the first position")
    _save(figure, axes, file)


def _draw_3(points: Sequence[Result], file: Path) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for attack, held in _by(points, "attack").items():
        xs, ys = _means(held, lambda p: p["tokens"], lambda p: 100 * p["rouge1"])
        axes.plot(xs, ys, "o-", label=_label(attack))
    axes.axvline(points[0]["width"], color="grey", linewidth=1)
    axes.set(xlabel="tokens in the batch", ylabel="ROUGE-1", ylim=(-3, 103))
    _save(figure, axes, file)


def _draw_4(points: Sequence[Result], file: Path) -> None:
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for attack, held in _by(points, "attack").items():
        xs, exact = _means(held, lambda p: p["spec"]["length"], lambda p: 100 * p["exact"] / p["num_texts"])
        left.plot(xs, exact, "o-", label=_label(attack))
        right.plot(*_means(held, lambda p: p["spec"]["length"], lambda p: p["cpu_seconds"]), "o-")
    left.set(xlabel="tokens a text", ylabel="texts exact, %", ylim=(-3, 103))
    right.set(xlabel="tokens a text", ylabel="CPU seconds a batch", yscale="log")
    _save(figure, left, file)


def _label(attack: str) -> str:
    return "this package" if attack == "ours" else attack.replace("dager", "DAGER")


def _by(points: Sequence[Result], name: str) -> dict[str, list[Result]]:
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for point in points:
        groups[point["spec"][name]].append(point)
    return groups


def _means(points: Sequence[Result], x: Any, y: Any) -> tuple[list[float], list[float]]:
    values: defaultdict[float, list[float]] = defaultdict(list)
    for point in points:
        values[x(point)].append(y(point))
    xs = sorted(values)
    return xs, [statistics.fmean(values[one]) for one in xs]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unmask"
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, axes: Any, file: Path) -> None:
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    _pyplot().close(figure)
