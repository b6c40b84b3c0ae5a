"""Encoders: how many texts are exact, at what cost, against Algorithm 3 of DAGER, and the paper's Table 1 for BERT.

python benchmarks/run.py gradients encoders --mode exact   MiniLM, 8 to 25 tokens, both poolings, two updates
python benchmarks/run.py gradients encoders --mode against-dager   MiniLM and BERT-base shape, in one process
python benchmarks/run.py gradients encoders --mode slopes   the cost in the number of texts and in their length
python benchmarks/run.py gradients encoders --mode paper   CoLA, SST-2 and Rotten Tomatoes at 1 to 8 texts

Every batch is written to --out (benchmarks/results/encoders_MODE.jsonl) when it is done, and what the file holds is not
run again; --no-resume starts it afresh. --max-anchors is the attack's own budget. 'exact' invents texts where there is
no data; 'paper' needs the three sets (see paper_tables.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from gradients.encoder_cases import ROWS
from gradients.encoder_costs import against_dager, slopes
from gradients.encoder_tables import WHOLE, exact, paper
from machine import machine
from text_sets import SETS, SHARED_DATA

RESULTS = Path(__file__).parents[1] / "results"
MODES = {"exact": exact, "against-dager": against_dager, "slopes": slopes, "paper": paper}
DEFAULTS = {
    "exact": {
        "rows": ["minilm"],
        "texts": [8, 16],
        "batches": 20,
        "poolings": ["mean", "first"],
        "keep": [WHOLE, "encoder."],
        "tokens": [8, 25],
    },
    "against-dager": {"texts": [1, 2, 4, 8, 16, 32], "lengths": [8, 10]},
    "slopes": {"texts": [1, 2, 4, 8, 16, 32], "lengths": [8, 12, 16, 24, 32, 48], "batches": 3},
    "paper": {
        "texts": [1, 2, 4, 8],
        "batches": 5,
        "poolings": ["first"],
        "keep": [WHOLE],
        "tokens": [3, 512],
        "max_anchors": 100,  # sentences of 50 tokens take seconds an anchor
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the tables of all that was asked for."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    print(machine(), flush=True)
    print(MODES[options.mode](options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options with the mode's defaults, and mistakes told before anything is run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="models")
    parser.add_argument("--texts", nargs="+", type=int, help="texts in a batch")
    parser.add_argument(
        "--lengths", nargs="+", type=int, help="tokens a text, [CLS] and [SEP] included (dager, slopes)"
    )
    parser.add_argument(
        "--distinct", action="store_true", help="dager, slopes: no word twice, Algorithm 3's easiest case"
    )
    parser.add_argument("--fixed-texts", type=int, default=4, help="slopes: texts while the length varies")
    parser.add_argument("--fixed-length", type=int, default=12, help="slopes: tokens while the number of texts varies")
    parser.add_argument("--tokens", nargs=2, type=int, help="exact, paper: shortest and longest text")
    parser.add_argument("--poolings", nargs="+", choices=["mean", "first"])
    parser.add_argument("--keep", nargs="+", help=f"parts of the update, by name; '{WHOLE}' for the whole")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="paper")
    parser.add_argument("--data", type=Path, help="exact: a TSV file, its first column is read; paper: a folder")
    parser.add_argument("--batches", type=int, help="batches a cell")
    parser.add_argument("--repeats", type=int, default=3, help="against-dager: runs of each attack")
    parser.add_argument("--limit", type=float, default=600.0, help="against-dager: seconds that Algorithm 3 may take")
    parser.add_argument("--max-anchors", type=int, help="budget of our attack (paper: 100); 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="keep what --out holds")
    parser.add_argument("--threads", type=int, help="of torch; one makes times on a shared machine comparable")
    known, _ = parser.parse_known_args(arguments)
    parser.set_defaults(out=RESULTS / f"encoders_{known.mode.replace('-', '_')}.jsonl", **DEFAULTS[known.mode])
    options = parser.parse_args(arguments)
    options.max_anchors = options.max_anchors or None
    if options.mode == "exact":
        if options.data is not None and not options.data.is_file():
            parser.error(f"{options.data} is no file; without --data, texts are invented if the sets are not there")
        options.data = options.data or SHARED_DATA / "rotten_tomatoes.tsv"
    if options.mode == "paper":
        options.data = options.data or SHARED_DATA
        for name in options.sets:
            if not (options.data / f"{name}.tsv").is_file():
                parser.error(f"{options.data} has no {name}.tsv; give its folder with --data, or use --sets")
    counts = [*options.texts, options.repeats, *([] if options.batches is None else [options.batches])]
    if min(counts) < 1 or min([*(options.lengths or []), *(options.tokens or []), 3]) < 3:
        parser.error("--texts, --repeats and --batches must be at least 1, and a text has 3 tokens at least")
    return options


if __name__ == "__main__":
    main()
