"""The same attacks in two editions of the package, in turns: CPU seconds, their ratio, and how they grow.

python benchmarks/run.py gradients speed --before ../other-checkout/src [--batches 3] [--data sentences.tsv] [--out …]

Each task runs in a process of its own, one edition after the other on the same texts, with one thread. A batch counts
as exact if every text comes back token by token; a certain text that is not in the batch is false. The slope is that of
log seconds against log texts, over the sizes of a task. A client's passes are what confirming takes at least.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from gradients.paper_tables import SHARED_DATA
from machine import machine

HERE = Path(__file__).parents[1]
# Name → texts in a batch, and what a worker runs. It gives `model`, `evidence` and `texts`, token by token, for `size`,
# `batch` and `data`, and may give `passes`, the seconds of the client's own.
ENCODER = """
from text_sets import draw_batch
from unmask.attacks.gradients.encoder.attack import EncoderAttack
model = unmask.load_model("minilm-l6")
lines = [line.split("\\t")[0] for line in Path(data).read_text(encoding="utf-8").splitlines() if line.strip()]
encoded = [tokens for tokens in map(model.encode, lines) if 8 <= len(tokens) <= 25]
texts = draw_batch(encoded, Path(data).stem, size, batch, 0)
evidence = unmask.observe_gradients(
    model, texts, task="classification", pooling={pooling!r}, seed=batch,
    parameters={keep!r},
)
attack = EncoderAttack()
"""
DECODER = """
from unmask.attacks.gradients.decoder.attack import DecoderAttack
model = unmask.load_model("smollm2-135m")
lines = [line.split("\\t")[0] for line in Path(data).read_text(encoding="utf-8").splitlines()]
order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(batch)).tolist()
texts = [model.encode(lines[index]) for index in order[:size]]
evidence = unmask.observe_gradients(model, texts)
attack = DecoderAttack()
from gradients.passes import least_seconds
passes = least_seconds(model, texts)
"""
BEYOND = """
from synthetic import gpt2_shape, zipf_batch
from unmask.attacks.gradients.decoder.attack import DecoderAttack
model = gpt2_shape()
texts = zipf_batch(size, 10, 31, model.vocab_size, seed=batch)
parameters = ["wte", "wpe", "h.0.", "h.11.mlp"]
evidence = unmask.observe_gradients(model, texts, task="classification", parameters=parameters)
attack = DecoderAttack()
"""
TASKS = {
    "MiniLM-L6, mean, all gradients": ((8, 16), ENCODER.format(pooling="mean", keep=None)),
    "MiniLM-L6, mean, embeddings withheld": ((8, 16), ENCODER.format(pooling="mean", keep=["encoder."])),
    "MiniLM-L6, [CLS], all gradients": ((8, 16), ENCODER.format(pooling="first", keep=None)),
    "MiniLM-L6, [CLS], embeddings withheld": ((8, 16), ENCODER.format(pooling="first", keep=["encoder."])),
    "SmolLM2-135M, next token": ((1, 16), DECODER),
    "GPT-2 shape, more tokens than the width": ((48, 64), BEYOND),
}
WORKER = """
import json, time, torch, unmask
from collections import Counter
from pathlib import Path
torch.set_num_threads(1)
size, batch, data = {size}, {batch}, {data!r}
passes = None
{task}
started = time.process_time()
found = attack(evidence, model)
seconds = time.process_time() - started
held = Counter(map(tuple, texts))
certain = Counter(text.tokens for text in found.value.certain for _ in range(text.count))
exact = (Counter(map(tuple, found.value.expand())) & held).total()
print(json.dumps(dict(seconds=seconds, passes=passes, exact=exact, texts=len(texts), tokens=sum(map(len, texts)),
                      false=(certain - held).total(), certain=certain.total(), certificate=found.certificate.holds)))
"""
Run = dict[str, Any]
Tasks = Mapping[str, tuple[tuple[int, ...], str]]


def main() -> None:
    """Attacks on gradients in both editions."""
    compare_editions(TASKS, __doc__)


def compare_editions(tasks: Tasks, description: str) -> None:
    """Run all tasks in both editions, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="src of the other edition")
    parser.add_argument(
        "--data", type=Path, default=SHARED_DATA / "rotten_tomatoes.tsv", help="sentences, first column"
    )
    parser.add_argument("--only", default="", help="tasks whose names hold this")
    parser.add_argument("--sizes", type=int, nargs="+", help="texts in a batch; by default two of each task")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.data.is_file():
        parser.error(f"{options.data} is no file; give a TSV file of sentences with --data")
    editions = {"before": options.before, "now": HERE.parent / "src"}
    runs: list[Run] = []
    chosen = [(task, size) for task, (sizes, _) in tasks.items() for size in options.sizes or sizes]
    for batch, (task, size) in product(range(options.batches), chosen):
        for edition, source in editions.items() if options.only in task else ():
            told = {"task": task, "size": size, "batch": batch, "edition": edition}
            runs.append({**told, **measure(source, tasks[task][1], size, batch, options.data)})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    print(report(runs))


def measure(source: Path, code: str, size: int, batch: int, data: Path) -> Run:
    """One attack in a fresh process."""
    path = os.pathsep.join([str(source.resolve()), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    code = WORKER.format(task=code, size=size, batch=batch, data=str(data.resolve()))
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{source}: {run.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(run.stdout.splitlines()[-1]))


def report(runs: list[Run]) -> str:
    """A line for each task and size, then the slopes."""
    lines = [
        f"CPU seconds of one thread, medians; {machine()}",
        "",
        "| task | texts | batches | before, s | now, s | before, tokens/s | now, tokens/s | ratio "
        "| a client's passes, s | exact, before | exact, now | false |",
        f"| --- |{' --: |' * 11}",
    ]
    for task, size in dict.fromkeys((run["task"], run["size"]) for run in runs):
        before, now = (_select(runs, task, size, edition) for edition in ("before", "now"))
        if not now:
            continue
        ratio = statistics.median(b["seconds"] / n["seconds"] for b, n in zip(before, now, strict=False))
        exact = [f"{sum(r['exact'] for r in part)} of {sum(r['texts'] for r in part)}" for part in (before, now)]
        seconds = [f"{statistics.median(r['seconds'] for r in part):.1f}" for part in (before, now)]
        rates = [f"{sum(r['tokens'] for r in part) / sum(r['seconds'] for r in part):.1f}" for part in (before, now)]
        false = sum(r["false"] for r in [*before, *now])
        passes = [run["passes"] for run in now if run.get("passes")]
        least = f"{statistics.median(passes):.1f}" if passes else "–"
        cells = [task, str(size), str(len(now)), *seconds, *rates, f"{ratio:.1f}×", least, *exact, str(false)]
        lines.append(f"| {' | '.join(cells)} |")
    for task in dict.fromkeys(run["task"] for run in runs):
        slopes = {edition: _slope([r for r in runs if r["task"] == task], edition) for edition in ("before", "now")}
        told = ", ".join(f"{edition} {slope:.2f}" for edition, slope in slopes.items() if slope is not None)
        lines += ["", f"{task}: log–log slope of the seconds in the number of texts {told}."] if told else []
    return "\n".join(lines)


def _select(runs: list[Run], task: str, size: int, edition: str) -> list[Run]:
    return [run for run in runs if (run["task"], run["size"], run["edition"]) == (task, size, edition)]


def _slope(runs: list[Run], edition: str) -> float | None:
    """The slope of a line through the medians of a task, at least and most texts."""
    sizes = sorted({run["size"] for run in runs})
    if len(sizes) < 2:
        return None
    seconds = [
        statistics.median(r["seconds"] for r in runs if r["size"] == size and r["edition"] == edition)
        for size in (sizes[0], sizes[-1])
        if any(r["size"] == size and r["edition"] == edition for r in runs)
    ]
    return math.log(seconds[1] / seconds[0]) / math.log(sizes[-1] / sizes[0]) if len(seconds) == 2 else None


if __name__ == "__main__":
    main()
