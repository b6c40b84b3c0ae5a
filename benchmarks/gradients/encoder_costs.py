"""`--mode against-dager` and `--mode slopes`: what texts of an encoder cost, by our attack and by Algorithm 3."""

from __future__ import annotations

import argparse
import math
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from baselines.algorithm3 import OutOfTimeError, as_dager, count, count_tuned, within
from gradients.encoder_cases import ROWS, Attack, Result, Tokens, attacked, code, key_of, word_salad
from machine import machine
from progress_bar import progress_bar
from result_lines import append, open_results

from unmask.attacks.gradients.encoder.attack import EncoderAttack
from unmask.models import Model
from unmask.protocols import observe_gradients

ONCE = 60.0  # seconds of Algorithm 3 from which on one run must tell


@dataclass(frozen=True)
class Cell:
    """Texts of one length, the same texts for both attacks."""

    mode: str
    row: str
    texts: int
    length: int  # tokens of a text, [CLS] and [SEP] among them
    batch: int
    seed: int
    attack: str
    distinct: bool
    repeats: int = 1
    limit: float = 0.0

    def words(self, model: Model) -> list[Tokens]:
        """The batch."""
        seed = zlib.crc32(repr((self.seed, self.texts, self.length, self.batch)).encode())
        return word_salad(model, self.texts, self.length, self.length, seed=seed, distinct=self.distinct)


# ---- against DAGER


def against_dager(options: argparse.Namespace) -> str:
    """Both attacks in turn in one process, on the same evidence."""
    attack = repr(EncoderAttack(max_anchors=options.max_anchors))
    settings = (0, options.seed, attack, options.distinct, options.repeats, options.limit)
    cells = [
        Cell("against-dager", row, texts, length, *settings)
        for row in options.rows
        for length in options.lengths
        for texts in options.texts
    ]
    results = _measured(cells, options, lambda model, cell: _compare(model, cell, options.max_anchors))
    return "\n".join([*_head(results), *COMPARISON, *map(_comparison, results), *_old(results)])


def _compare(model: Model, cell: Cell, max_anchors: int | None) -> Result:
    """Ours, Algorithm 3, ours, …; Algorithm 3 is not run where its products alone would take longer than the limit."""
    texts = cell.words(model)
    evidence = observe_gradients(model, texts, task="classification", pooling="first", seed=cell.seed)
    ours = EncoderAttack(max_anchors=max_anchors)
    ours(evidence, model)  # warm
    counted = count_tuned(evidence, model, texts, timed=True)
    paper = within(cell.limit, as_dager(counted))
    tally, least = counted.tally, counted.tally.least_seconds
    runs: dict[str, list[Result]] = {"ours": [], "dager": []}
    for repeat in range(cell.repeats):
        runs["ours"].append(attacked(ours, evidence, model, texts))
        spent = sum(run["seconds"] for run in runs["dager"])
        if least > cell.limit or (repeat and spent > ONCE):
            continue
        started = time.perf_counter()
        try:
            runs["dager"].append(attacked(paper, evidence, model, texts))
        except OutOfTimeError:
            least = max(least, time.perf_counter() - started)
    if runs["dager"]:
        runs["ours"].append(attacked(ours, evidence, model, texts))
    medians = {name: statistics.median(run["seconds"] for run in held) for name, held in runs.items() if held}
    both = {name: held[-1] | {"seconds": medians[name], "runs": len(held)} for name, held in runs.items() if held}
    is_measured = "dager" in both
    return {
        "tokens": sum(map(len, texts)),
        "products_needed": tally.needed,
        "products_checked": tally.checked,
        "token_tolerance": counted.token_tolerance,
        "ours": both["ours"],
        "dager": both.get("dager"),
        "dager_seconds_at_least": None if is_measured else least,
        "ratio": medians["dager"] / medians["ours"] if is_measured else None,
        "ratio_at_least": None if is_measured else least / medians["ours"],
    }


COMPARISON = (
    "Products: sequences that Algorithm 3 has to check if each text leaves its sets as soon as it can, the best case;",
    "its budget is 10 M for each length. 'not run': it would take longer than the limit. '≥' is NOT a measurement but",
    "its token sets, measured, and these products (or 10 M of them) at the fastest rate that was measured; where that",
    "was below the limit and it went on all the same, the time after which it was stopped.",
    "Its τ₁ is the paper's 1e-5, or 3e-5 or 1e-4, and its rank tolerance is swept, where that keeps more texts of the",
    "batch: tuned in its favour by whoever knows the texts.",
    "Ratio of medians; † says that not all texts were exact, so that it compares a run that failed.",
    "",
    "| model | texts | tokens each | τ₁ | products | ours exact | DAGER exact | ours ROUGE-2 | DAGER ROUGE-2 | ours, s "
    "| DAGER, s | ratio |",
    "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
)


def _comparison(result: Result) -> str:
    cell, ours, dager = result["cell"], result["ours"], result["dager"]
    measured = dager is not None
    mark = "" if all(run["exact"] == cell["texts"] for run in (ours, dager) if run) else " †"
    columns = [
        ROWS[cell["row"]].label,
        str(cell["texts"]),
        str(cell["length"]),
        f"{result['token_tolerance']:.0e}",
        f"{result['products_needed']:,}" if result["products_needed"] < 1e9 else f"{result['products_needed']:.1e}",
        f"{ours['exact']}/{cell['texts']}",
        f"{dager['exact']}/{cell['texts']}" if measured else "not run",
        f"{100 * ours['rouge2']:.1f}",
        f"{100 * dager['rouge2']:.1f}" if measured else "not run",
        f"{ours['seconds']:.2f}",
        f"{dager['seconds']:.1f}" if measured else f"≥ {result['dager_seconds_at_least']:,.0f}",
        (f"{result['ratio']:.1f}×" if measured else f"≥ {result['ratio_at_least']:,.0f}×") + mark,
    ]
    return f"| {' | '.join(columns)} |"


# ---- slopes


def slopes(options: argparse.Namespace) -> str:
    """Seconds and Gauss–Newton steps against the number of texts and against their length, as log-log slopes."""
    attack = repr(EncoderAttack(max_anchors=options.max_anchors))
    axes = {"texts": [], "length": []}
    for row in options.rows:
        template = Cell(
            "slopes", row, options.fixed_texts, options.fixed_length, 0, options.seed, attack, options.distinct
        )
        room = ROOM[row]
        axes["texts"] += [replace(template, texts=n) for n in options.texts if n * options.fixed_length <= room]
        axes["length"] += [replace(template, length=n) for n in options.lengths if n * options.fixed_texts <= room]
    drawn = {
        axis: [replace(cell, batch=batch) for cell in cells for batch in range(options.batches)]
        for axis, cells in axes.items()
    }
    everything = list(dict.fromkeys([*drawn["texts"], *drawn["length"]]))
    ours = EncoderAttack(max_anchors=options.max_anchors)
    results = _measured(everything, options, lambda model, cell: _cost(ours, model, cell))
    by_cell = {Cell(**result["cell"]): result for result in results}
    lines = [*_head(results)]
    for row in options.rows:
        for axis, cells in drawn.items():
            held = [by_cell[cell] for cell in cells if cell.row == row]
            if held:
                lines += _slope(options, row, axis, held)
    return "\n".join([*lines, *_old(results)])


# Rows that the first block can tell apart: the width, less what the output projection's span must leave free.
ROOM = {"minilm": 384 - 6, "bert-base": 768 - 6}
MEASURES = {"seconds": "seconds", "steps": "Gauss–Newton steps", "products_needed": "Algorithm 3's products"}


def _cost(ours: Attack, model: Model, cell: Cell) -> Result:
    """Our attack, and the products of Algorithm 3, which is not run."""
    texts = cell.words(model)
    evidence = observe_gradients(model, texts, task="classification", pooling="first", seed=cell.seed + cell.batch)
    if cell.batch == 0:
        ours(evidence, model)  # warm
    tally = count(evidence, model, texts, timed=False).tally
    products = {"products_needed": tally.needed, "products_checked": tally.checked}
    return attacked(ours, evidence, model, texts) | products


def _slope(options: argparse.Namespace, row: str, axis: str, results: Sequence[Result]) -> list[str]:
    """A table over one axis with its slopes; these are written down too."""
    sizes = sorted({result["cell"][axis] for result in results})
    groups = {size: [result for result in results if result["cell"][axis] == size] for size in sizes}
    fixed = f"{options.fixed_length} tokens a text" if axis == "texts" else f"{options.fixed_texts} texts"
    medians = {
        name: {size: statistics.median(result[name] for result in group) for size, group in groups.items()}
        for name in MEASURES
    }
    fits = {name: log_log_slope(sizes, list(values.values())) for name, values in medians.items()}
    append_once(options, {"row": row, "axis": axis, "fixed": fixed, "sizes": sizes, "slopes": fits}, results)
    lines = [
        "",
        f"{ROWS[row].label}; {fixed}; medians over {max(map(len, groups.values()))} batches",
        "",
        f"| {axis} | exact | seconds | steps | anchors | Algorithm 3's products |",
        "| --: | --: | --: | --: | --: | --: |",
    ]
    for size, group in groups.items():
        num_exact, num_texts = sum(r["exact"] for r in group), sum(r["texts"] for r in group)
        anchors = statistics.median(result["anchors"] for result in group)
        seconds, steps, products = (medians[name][size] for name in MEASURES)
        lines.append(f"| {size} | {num_exact}/{num_texts} | {seconds:.2f} | {steps:g} | {anchors:g} | {products:.3g} |")
    told = (f"{label} {fits[name]:.2f}" for name, label in MEASURES.items() if fits[name] is not None)
    return [*lines, "", f"log-log slopes in {axis}: {', '.join(told)}"]


def log_log_slope(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """The exponent by least squares on logarithms; None where there is nothing to fit."""
    if len(sizes) < 2 or min(values) <= 0:
        return None
    return float(np.polyfit(np.log(sizes), [math.log(value) for value in values], 1)[0])


def append_once(options: argparse.Namespace, fit: Result, results: Sequence[Result]) -> None:
    """Write a fit down unless the file holds it: its key is that of the results that it was made from."""
    of = [result["key"] for result in results]
    key = "-".join(["slopes", fit["row"], fit["axis"], *of])
    if options.out is not None and key not in open_results(options.out, True):
        append(options.out, {"key": key, **fit, "code": code(), "machine": machine()})


# ---- both


def _measured(
    cells: Sequence[Cell], options: argparse.Namespace, measure: Callable[[Model, Cell], Result]
) -> list[Result]:
    """Results of all cells; those that the file lacks are measured, model by model, and written at once."""
    results = open_results(options.out, options.resume)
    missing = [cell for cell in cells if key_of(cell) not in results]
    with progress_bar(len(missing)) as advance:
        for row in dict.fromkeys(cell.row for cell in missing):
            model = ROWS[row].load()
            for cell in (cell for cell in missing if cell.row == row):
                advance(f"{row}, {cell.texts} texts of {cell.length} tokens", 0)
                found = measure(model, cell)
                result = {"key": key_of(cell), "cell": asdict(cell), **found, "code": code(), "machine": machine()}
                results[result["key"]] = result
                append(options.out, result)
                advance("done", 1)
    return [results[key_of(cell)] for cell in cells]


def _head(results: Sequence[Result]) -> list[str]:
    drawn = "no word twice in a batch" if results[0]["cell"]["distinct"] else "Zipf"
    return [
        f"Invented texts (random whole words, {drawn}); classification on [CLS]; whole update; float32, no dropout.",
        *(f"Machine: {name}." for name in sorted({result["machine"] for result in results})),
        *(f"Ours: {attack}." for attack in sorted({result["cell"]["attack"] for result in results})),
    ]


def _old(results: Sequence[Result]) -> list[str]:
    num_old = sum(result["code"] != code() for result in results)
    return [f"\n{num_old} of {len(results)} cells were measured with another version of the code."] if num_old else []
