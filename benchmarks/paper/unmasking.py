"""Unmasking Transformers (arXiv 2310.12462), whole: every number of docs/paper-unmasking.md, its plots and the page.

python benchmarks/run.py paper unmasking                    # measure all parts, write the results, plots and the page
python benchmarks/run.py paper unmasking --parts bounds     # measure some; results of the others are kept
python benchmarks/run.py paper unmasking --only-page        # plots and the page from stored results

Parts: stacks of layers, gradient descent as a rival, wrong weights, the paper's constants, indefinite W. Random layers:
X of standard normal entries, W = s·AAᵀ/d^1.5 (pd, definite), with a skew part (pdskew), or s·G/d (gauss, indefinite).
Seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from machine import machine
from paper.descent import measure_rivals
from paper.unmasking_indefinite import measure_indefinite
from paper.unmasking_page import write_page
from paper.unmasking_weights import measure_bounds, measure_sensitivity, measure_stacks

ROOT = Path(__file__).parents[2]
PARTS: dict[str, Callable[[bool], Iterator[dict]]] = {
    "bounds": measure_bounds,
    "sensitivity": measure_sensitivity,
    "stacks": measure_stacks,
    "rivals": measure_rivals,
    "indefinite": measure_indefinite,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what was asked for, then write the page from all that is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    parser.add_argument("--small", action="store_true", help="a few problems of each part, to see that it runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "paper_unmasking.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page and its plots")
    options = parser.parse_args(arguments)
    if not options.docs.is_dir():
        parser.error(f"{options.docs} is no folder; make it first, or name another one with --docs")
    if options.only_page and not options.out.is_file():
        parser.error(f"{options.out} does not exist; measure some parts first, without --only-page")
    torch.set_num_threads(1)
    results = json.loads(options.out.read_text()) if options.out.exists() else {"parts": {}}
    for part in () if options.only_page else options.parts:
        rows: list[dict] = []
        for row in PARTS[part](options.small):
            rows.append(row)
            print(part, row, flush=True)
            results["parts"][part], results["machine"] = rows, machine()
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results, options.docs)


if __name__ == "__main__":
    main()
