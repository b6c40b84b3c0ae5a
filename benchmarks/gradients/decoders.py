"""Ours against DAGER, tuned: the same gradients, one process, interleaved; ratios and log-log slopes.

    python benchmarks/run.py gradients decoders [--texts 1 2 4 8 16 32] [--repeats 3] [--out results.json] [--skip-real]

GPT-2 at its true shape with random weights (classification with the paper's head; about 15 tokens a text), and
SmolLM2-135M with its real weights (next-token, a first token that the adversary knows, as DAGER needs it). DAGER's rank
tolerance and cut are swept, and the setting that finds the most texts is timed. Ours reads the whole update;
`against_papers.py` has a row on DAGER's own tensors too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from baselines.against_papers import num_exact, tune
from baselines.dager_sweep import DagerSweep
from gradients.paper_clients import PAPERS_HEAD_SCALE, draw_head
from machine import machine
from synthetic import gpt2_shape, zipf_batch

from unmask.attacks.baselines.dager import Dager
from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.evidence import GradientEvidence
from unmask.models import Model, load_model
from unmask.protocols import observe_gradients


def main() -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--skip-real", action="store_true", help="only the GPT-2 shape")
    options = parser.parse_args()
    print(machine())
    document = {"machine": machine(), "gpt2": gpt2_rows(options.texts, options.repeats)}
    if not options.skip_real:
        document["smollm2"] = smollm2_rows([count for count in options.texts if count <= 16], options.repeats)
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n")


def gpt2_rows(counts: Sequence[int], repeats: int) -> list[dict]:
    """GPT-2 shape, classification."""
    model = gpt2_shape()
    header("GPT-2 shape (12 blocks, width 768, random weights), classification")
    rows = []
    for count in counts:
        texts = zipf_batch(count, 12, 18, model.vocab_size, seed=count)
        head = draw_head(model, 2, PAPERS_HEAD_SCALE, count)
        evidence = observe_gradients(model, texts, task="classification", head=head)
        rows.append(compare(model, texts, evidence, repeats))
    slopes(rows)
    return rows


def smollm2_rows(counts: Sequence[int], repeats: int) -> list[dict]:
    """SmolLM2-135M, real weights, next-token."""
    model = load_model("smollm2-135m")
    header("SmolLM2-135M (30 blocks, width 576, real weights), next-token")
    rows = []
    for count in counts:
        start = model.tokenizer.bos_token_id
        texts = zipf_batch(count, 12, 18, model.vocab_size, seed=count, first=start)
        rows.append(compare(model, texts, observe_gradients(model, texts), repeats, start))
    slopes(rows)
    return rows


def compare(
    model: Model, texts: list[list[int]], evidence: GradientEvidence, repeats: int, start_token: int | None = None
) -> dict:
    """Both attacks in turn on the same evidence; medians of `repeats` runs after one warm-up of ours."""
    # The paper leaves the last token of next-token training open: its texts count as exact without it.
    open_ended = evidence.task is not None and evidence.task.value == "next_token"
    papers_texts = [text[:-1] for text in texts] if open_ended else texts
    sweep = DagerSweep(Dager(start_token=start_token)).settings(evidence, model)
    ours, (paper, _, _) = DecoderAttack(), tune(evidence, model, papers_texts, sweep)
    ours(evidence, model)
    seconds: dict[str, list[float]] = {"ours": [], "paper": []}
    found = {}
    for repeat in range(repeats):
        for name, attack in (("ours", ours), ("paper", paper)):
            if name == "paper" and repeat and sum(seconds["paper"]) > 60:
                continue  # minutes each: one run tells
            started = time.perf_counter()
            found[name] = attack(evidence, model)
            seconds[name].append(time.perf_counter() - started)
    row = {"texts": len(texts), "tokens": sum(map(len, texts))}
    for name, recovery in found.items():
        row[f"{name}_exact"] = num_exact(recovery, papers_texts if name == "paper" else texts)
        row[f"{name}_seconds"] = statistics.median(seconds[name])
    row["ratio"] = row["paper_seconds"] / row["ours_seconds"]
    print(
        f"{row['texts']:>6} {row['tokens']:>7} {row['ours_exact']:>11} {row['paper_exact']:>12} "
        f"{row['ours_seconds']:>9.2f} {row['paper_seconds']:>10.1f} {row['ratio']:>7.0f}×",
        flush=True,
    )
    return row


def header(title: str) -> None:
    """Column names."""
    columns = ("texts", "tokens", "ours exact", "DAGER exact", "ours, s", "DAGER, s", "ratio")
    widths = (6, 7, 11, 12, 9, 10, 8)
    print(f"\n{title}")
    print(" ".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True)))


def slopes(rows: Sequence[dict]) -> None:
    """Exponents of seconds against tokens by least squares on logarithms."""
    if len(rows) < 2:
        return
    x = [math.log(row["tokens"]) for row in rows]
    for name in ("ours", "paper"):
        y = [math.log(row[f"{name}_seconds"]) for row in rows]
        print(f"log-log slope in tokens, {name}: {statistics.linear_regression(x, y).slope:.2f}")


if __name__ == "__main__":
    main()
