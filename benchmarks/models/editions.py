"""The same work in two editions of the package, in turns: what asking a model costs, and what attacks take.

python benchmarks/run.py models editions --before ../other-checkout/src [--repeats 3] [--out results.json]
python benchmarks/run.py models editions --before … --tasks cuda     # the Llama-2-7B shape on a GPU, random weights

Each task runs in a process of its own, first with one edition, then with the other; the fastest of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from machine import machine

HERE = Path(__file__).parents[1]
# Name → (where it runs, what is done once, what is timed).
TASKS = {
    "SmolLM2-135M, asked": ("cpu", "hf = load('smollm2-135m').hf", "unmask.load_model(hf)"),
    "SmolLM2-135M, gradients of 4 texts": (
        "cpu",
        "model = load('smollm2-135m'); seen = unmask.observe_gradients(model, invented(4))",
        "unmask.recover_text(seen, model)",
    ),
    "SmolLM2-135M, prompts from layer 4": (
        "cpu",
        "model = load('smollm2-135m'); seen = unmask.observe_hidden(model, invented(4), layer=4)\n"
        "unmask.recover_text(seen, model)",  # calibrates once
        "unmask.recover_text(seen, model)",
    ),
    "MiniLM-L6, gradients of 4 texts": (
        "cpu",
        "model = load('minilm-l6')\n"
        "seen = unmask.observe_gradients(model, invented(4), task='classification', labels=[0, 1, 0, 1])",
        "unmask.recover_text(seen, model)",
    ),
    "GPT-2 shape, gradients of 8 texts": (
        "cpu",
        "from synthetic import gpt2_shape, zipf_batch\n"
        "model = gpt2_shape(); seen = unmask.observe_gradients(model, zipf_batch(8, 12, 18, model.vocab_size, seed=0))",
        "unmask.recover_text(seen, model)",
    ),
    **{
        f"Llama-2-7B shape, gradients of {count} texts": (
            "cuda",
            "from synthetic import llama_2_7b_shape, zipf_batch\n"
            "from unmask.attacks.gradients.decoder.attack import DecoderAttack\n"
            f"model = llama_2_7b_shape(device='cuda'); texts = zipf_batch({count}, 13, 34, model.vocab_size, seed=1)\n"
            "kept = ['layers.0.self_attn', 'layers.1.mlp.down_proj']\n"
            "seen = unmask.observe_gradients(model, texts, parameters=kept)\n"
            "attack = DecoderAttack(memory_budget_bytes=8 * 2**30); attack(seen, model)",  # warms up
            "attack(seen, model); torch.cuda.synchronize()",
        )
        for count in (1, 32, 160)
    },
}
WORKER = """
import time, torch, unmask
from invented import invented
load = unmask.load_model
{before}
seconds = []
for _ in range(2):
    started = time.perf_counter()
    {timed}
    seconds.append(time.perf_counter() - started)
print(min(seconds))
"""


def main() -> None:
    """Run all tasks of a place in both editions, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="src of the other edition")
    parser.add_argument("--tasks", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'task':<42} {'before':>8} {'now':>8} {'ratio':>6}   seconds, {machine()}")
    for name, (place, before, timed) in TASKS.items():
        if place != options.tasks:
            continue
        editions = {"before": options.before, "now": HERE.parent / "src"}
        seconds = {edition: float("inf") for edition in editions}
        for _ in range(options.repeats):
            for edition, source in editions.items():
                seconds[edition] = min(seconds[edition], measure(source, before, timed))
        rows.append({"task": name, **seconds})
        ratio = seconds["now"] / seconds["before"]
        print(f"{name:<42} {seconds['before']:8.2f} {seconds['now']:8.2f} {ratio:6.2f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


def measure(source: Path, before: str, timed: str) -> float:
    """Seconds of one task in a fresh process."""
    path = os.pathsep.join([str(source.resolve()), str(HERE)])
    code = WORKER.format(before=before, timed=timed)
    command, environment = [sys.executable, "-W", "ignore", "-c", code], {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{source}: {run.stderr.strip().splitlines()[-1]}")
    return float(run.stdout.split()[-1])


if __name__ == "__main__":
    main()
