"""More tokens than the width: GPT-2 shape, classification, one batch a row. The paper calls b > d unachievable.

python benchmarks/run.py gradients beyond [--texts 48 64 80] [--device cpu] [--data FILE] [--out results.json]

Texts are invented, or lines of a file (`sentence<TAB>label`) in SmolLM2's tokens, which fit GPT-2's vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from machine import machine
from synthetic import gpt2_shape, zipf_batch
from transformers import AutoTokenizer

from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.models import Model
from unmask.models.catalog import resolve
from unmask.protocols import observe_gradients


def main() -> None:
    """Attack one batch of each size, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[48, 64])
    parser.add_argument("--tokens", type=int, nargs=2, default=[10, 31], help="shortest and longest text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="take lines of this file instead of invented texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.data and not options.data.is_file():
        parser.error(f"{options.data} is no file; give a file of lines with --data")
    where = machine() if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"GPT-2 shape (12 blocks, width 768), classification; {where}")
    print(f"{'texts':>6} {'prefixes':>9} {'b/d':>6} {'exact':>9} {'false':>6} {'seconds':>8}  status")
    model = gpt2_shape().to(device=options.device)
    rows = [measure(model, draw(options, model.vocab_size, count)) for count in options.texts]
    if options.out:
        source = options.data.name if options.data else "invented"
        options.out.write_text(json.dumps({"machine": where, "texts_of": source, "rows": rows}, indent=2) + "\n")


def draw(options: argparse.Namespace, vocab_size: int, num_texts: int) -> list[list[int]]:
    """Token ids of one batch."""
    if options.data is None:
        return zipf_batch(num_texts, *options.tokens, vocab_size, seed=options.seed)
    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2-135m"), local_files_only=True)
    lines = [line.split("\t")[0] for line in options.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = torch.randperm(len(lines), generator=torch.Generator().manual_seed(options.seed))[:num_texts].tolist()
    return [tokenizer(lines[index])["input_ids"] for index in chosen]


def measure(model: Model, texts: list[list[int]]) -> dict:
    """One batch."""
    num_texts = len(texts)
    evidence = observe_gradients(model, texts, task="classification", parameters=["wte", "wpe", "h.0.", "h.11.mlp"])
    recovery = DecoderAttack()(evidence, model)
    found, held = Counter(recovery.value.expand()), Counter(map(tuple, texts))
    prefixes = len({tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)})
    row = {
        "texts": num_texts,
        "prefixes": prefixes,
        "b_over_d": prefixes / model.width,
        "exact": (found & held).total(),
        "false": (found - held).total(),
        "seconds": recovery.cost.seconds,
        "status": recovery.status.name,
    }
    print(
        f"{num_texts:>6} {prefixes:>9} {row['b_over_d']:>6.2f} {row['exact']:>5}/{num_texts:<3} {row['false']:>6} "
        f"{row['seconds']:>8.1f}  {row['status']}: {recovery.reason}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
