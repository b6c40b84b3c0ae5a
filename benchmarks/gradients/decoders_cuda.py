"""Llama-2-7B shape on one GPU: exact texts at 1 to 160 texts, in seconds. Needs the core dependencies only.

python benchmarks/run.py gradients decoders_cuda [--texts 1 8 32 128 160] [--blocks 2] [--repeats 3] [--out …]

Beside them the seconds of the client's own passes over the same texts (`passes.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from gradients.passes import run_both_ways
from synthetic import llama_2_7b_shape, zipf_batch

from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.protocols import observe_gradients


def main() -> None:
    """Measure every batch size, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128, 160])
    parser.add_argument("--blocks", type=int, default=2, help="the real model has 32: 27 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = llama_2_7b_shape(options.blocks, device=options.device)
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    print(f"Llama-2-7B shape, {options.blocks} blocks, float32, {machine}, torch {torch.__version__}")
    print(f"{'texts':>6} {'tokens':>7} {'exact':>9} {'false':>6} {'seconds':>8} {'passes':>7} {'GiB':>6}  status")
    about = {"machine": machine, "torch": torch.__version__, "blocks": options.blocks}
    rows = [measure(model, num_texts, options.repeats) for num_texts in options.texts]
    if options.out:
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=2))


def measure(model, num_texts: int, repeats: int) -> dict:
    """Attack one batch several times; the median counts, the first run (warm-up) does not."""
    texts = zipf_batch(num_texts, 13, 34, model.vocab_size, seed=num_texts, first=1)
    evidence = observe_gradients(
        model, texts, parameters=["layers.0.self_attn", f"layers.{model.num_blocks - 1}.mlp.down_proj"]
    )
    attack = DecoderAttack(memory_budget_bytes=8 * 2**30)
    on_gpu = model.device.type == "cuda"
    passes, _ = timed(lambda: run_both_ways(model, texts), repeats, on_gpu)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, recovery = timed(lambda: attack(evidence, model), repeats, on_gpu)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    found, held = Counter(recovery.value.expand()), Counter(map(tuple, texts))
    row = {
        "texts": num_texts,
        "tokens": sum(map(len, texts)),
        "exact": (found & held).total(),
        "false": (found - held).total(),
        "seconds": seconds,
        "passes": passes,
        "peak_gib": peak,
        "status": recovery.status.name,
    }
    print(
        f"{num_texts:>6} {row['tokens']:>7} {row['exact']:>5}/{num_texts:<3} {row['false']:>6} {row['seconds']:>8.2f} "
        f"{passes:>7.2f} {peak:>6.1f}  {row['status']}: {recovery.reason}",
        flush=True,
    )
    return row


def timed(work, repeats: int, on_gpu: bool) -> tuple:
    """The median of some runs, without the first, and what the last one gave."""
    seconds, result = [], None
    for _ in range(repeats + 1):
        started = time.perf_counter()
        result = work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), result


if __name__ == "__main__":
    main()
