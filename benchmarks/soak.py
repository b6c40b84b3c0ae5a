"""A campaign against unmask's own promise: nothing certain is false, nothing crashes, no finding is lost.

    python benchmarks/soak.py --parts gradients --runs gradients=1000 --workers 2
    python benchmarks/soak.py --minutes 30 --workers 2 --out runs/soak.json

gradients  updates of tiny decoders: hard batches × tasks × protocols × defences × missing tensors
encoders   the same of tiny BERT models, and of MiniLM where it is installed
federations  what LLM federations send: LoRA, AdamW, local steps, few digits, noise
decayed    gradients of decoders with weight decay inside
states     hidden states of both, some with one large number in all of them
defended   states and caches behind random chains of defences: no gate is held over a leak
permuted   states and caches whose rows are in another order, or of two texts; attention may be weak
controls   evidence whose signal was destroyed: nothing may be certain
files      damaged files of evidence: refused with a sentence, or read
oracles    functions that are no attention layers: never taken for one
lengths    services that are another function at other lengths: recovered only as far as it is true
kills      audits that are killed and resumed: no finding is lost or doubled

Every run follows from its part and its seed alone. A failure is printed with its seed, shrunk, and stored as a few
lines of Python. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from campaign.outcome import FAULTS
from campaign.parts import PARTS
from campaign.runner import Campaign, Tally
from machine import machine

import unmask

# The numbers of runs that the results in the repository come from.
RUNS = {
    "gradients": 10_000,
    "decayed": 1_000,
    "encoders": 1_000,
    "federations": 2_000,
    "states": 1_000,
    "defended": 1_000,
    "permuted": 1_000,
    "controls": 1_000,
    "files": 1_000,
    "oracles": 200,
    "lengths": 200,
    "kills": 50,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print counts, write JSON."""
    options = read_options(arguments)
    runs = {name: options.runs.get(name, RUNS[name]) for name in options.parts}
    campaign = Campaign(runs, options.seed, options.workers, options.threads, options.minutes, options.shrink, tell)
    started = time.monotonic()
    tallies = campaign.run()
    document = report(tallies, options, time.monotonic() - started)
    print_table(tallies)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(tally.faults.total() for tally in tallies.values()) else 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", nargs="+", default=[], metavar="PART=N", help=f"of each part; {RUNS}")
    parser.add_argument("--minutes", type=float, help="end after so long, parts taking equal shares")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of every part")
    parser.add_argument("--workers", type=int, default=1, help="processes; 0: none but this one")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process; rounding depends on them")
    parser.add_argument("--shrink", type=int, default=2, help="failures of one kind that are shrunk")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        options.runs = {name: int(number) for name, number in (text.split("=") for text in options.runs)}
    except ValueError:
        parser.error("--runs takes part=number, as in --runs gradients=100 kills=5")
    return options


def report(tallies: dict[str, Tally], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What is stored."""
    return {
        "machine": machine(),
        "versions": {
            "unmask": unmask.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "commit": commit(),
        "seed": options.seed,
        "workers": options.workers,
        "threads": options.threads,
        "seconds": round(seconds),
        "faults": {kind: sum(tally.faults[kind] for tally in tallies.values()) for kind in FAULTS},
        "parts": {name: tally.document() for name, tally in tallies.items()},
    }


def commit() -> str:
    """The commit, marked where files that matter were changed since."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


def print_table(tallies: dict[str, Tally]) -> None:
    """Counts of faults by part, then recall by kind of batch."""
    print(f"\n{'':12}{'runs':>8}{'RECOVERED':>11}  faults")
    for name, tally in tallies.items():
        faults = ", ".join(f"{kind} {number}" for kind, number in tally.faults.most_common()) or "none"
        print(f"{name:12}{tally.runs:8}{tally.statuses['RECOVERED']:11}  {faults}")
    for name, tally in tallies.items():
        for group, row in tally.document()["recall"].items():
            print(
                f"{name}, {group}: recall {row['recall']:.2f}, undisturbed {row.get('plain_recall', float('nan')):.2f}"
            )


def tell(text: str) -> None:
    """A line of progress, at once."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
