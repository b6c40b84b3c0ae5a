"""Llama-2-7B shape on one GPU: exact texts at 1 to 160 texts, in seconds. Needs the core dependencies only.

python benchmarks/run.py gradients decoders_cuda [--texts 1 8 32 128 160] [--repeats 3] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from synthetic import llama_2_7b_shape, zipf_batch

from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.protocols import observe_gradients


def main() -> None:
    """Measure every batch size, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128, 160])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = llama_2_7b_shape(device=options.device)
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    print(f"Llama-2-7B shape, two blocks, float32, {machine}, torch {torch.__version__}")
    print(f"{'texts':>6} {'tokens':>7} {'exact':>9} {'false':>6} {'seconds':>8} {'GiB':>6}  status")
    rows = [measure(model, num_texts, options.repeats) for num_texts in options.texts]
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "rows": rows}, indent=2))


def measure(model, num_texts: int, repeats: int) -> dict:
    """Attack one batch several times; the median counts, the first run (warm-up) does not."""
    texts = zipf_batch(num_texts, 13, 34, model.vocab_size, seed=num_texts, first=1)
    evidence = observe_gradients(model, texts, parameters=["layers.0.self_attn", "layers.1.mlp.down_proj"])
    attack = DecoderAttack(memory_budget_bytes=8 * 2**30)
    seconds = []
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 1):
        started = time.perf_counter()
        recovery = attack(evidence, model)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    found, held = Counter(recovery.value.expand()), Counter(map(tuple, texts))
    row = {
        "texts": num_texts,
        "tokens": sum(map(len, texts)),
        "exact": (found & held).total(),
        "false": (found - held).total(),
        "seconds": statistics.median(seconds[1:]),
        "peak_gib": peak,
        "status": recovery.status.name,
    }
    print(
        f"{num_texts:>6} {row['tokens']:>7} {row['exact']:>5}/{num_texts:<3} {row['false']:>6} {row['seconds']:>8.2f} "
        f"{peak:>6.1f}  {row['status']}: {recovery.reason}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
