"""An audit on Ray: the same plan with one and with several workers, speed-up and efficiency.

python benchmarks/run.py scale audit [--cases 1000] [--workers 1 2] [--repeats 2] [--real 24] [--out results.json]

Two plans. 'small' has many short cases (the bag of words of a Llama of two blocks with random weights, half of them
clipped, each of which has its control in another case): what is serial in the engine shows here. 'smollm2-135m' has
fewer cases with real weights. Each run is a process of its own with a cluster of its own, runs alternate, and the best
of several counts, as cores that others use slow a run down and never speed it up.

wall      seconds from the first finding to the last one
cases/s   of the last four fifths of the findings, as workers still start in the first; the speed-up is their ratio
work      seconds that the cases themselves took, added up over the workers: the same for any number of workers where
          cores are free
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from machine import machine
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from unmask.audit.findings.finding import ERROR
from unmask.audit.plan import load_plan
from unmask.audit.run import run_audit

VOCAB = 400
TEXTS = 200
REAL = "smollm2-135m"


def main() -> None:
    """Run both plans with each number of workers in turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of the small model")
    parser.add_argument("--real", type=int, default=24, help=f"cases of {REAL}; 0 leaves them out")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", nargs=3, metavar=("PLAN", "FOLDER", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(Path(options.run[0]), Path(options.run[1]), int(options.run[2]))))
        return
    print(machine())
    print(f"{'plan':<14}{'cases':>6}{'workers':>9}{'wall s':>9}{'work s':>9}{'cases/s':>9}{'speed-up':>10}  efficiency")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        plans = {"small": small_plan(Path(scratch), options.cases)}
        if options.real:
            plans[REAL] = real_plan(Path(scratch), options.real)
        for name, plan in plans.items():
            rows += measure(name, plan, Path(scratch), options.workers, options.repeats)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


def measure(name: str, plan: Path, scratch: Path, workers: list[int], repeats: int) -> list[dict]:
    """The best run of each number of workers."""
    best: dict[int, dict] = {}
    for repeat in range(repeats):
        for number in workers:
            one = run_apart(plan, scratch / f"{name}-{number}-{repeat}", number)
            best[number] = max(best.get(number, one), one, key=lambda each: each["rate"])
    rows = []
    for number in workers:
        row = {"plan": name, "workers": number, **best[number]}
        row["speed_up"] = row["rate"] / best[workers[0]]["rate"] * workers[0]
        row["efficiency"] = row["speed_up"] / number
        rows.append(row)
        print(
            f"{name:<14}{row['cases']:>6}{number:>9}{row['wall']:>9.1f}{row['work']:>9.1f}"
            f"{row['rate']:>9.1f}{row['speed_up']:>10.2f}{row['efficiency']:>12.0%}",
            flush=True,
        )
    return rows


def run_apart(plan: Path, folder: Path, workers: int) -> dict:
    """One run in a process of its own, with one thread a worker."""
    script = [sys.executable, str(Path(__file__).parents[1] / "run.py"), "scale", "audit"]
    told = ["--run", str(plan), str(folder), str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run([*script, *told], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def run(path: Path, folder: Path, workers: int) -> dict:
    """Seconds of an audit on a cluster of so many cores."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, object_store_memory=256 * 2**20)
    watch = Watch()
    plan = load_plan(path)
    verdict = run_audit(plan, folder, engine="ray", device="cpu", watch=watch)
    ray.shutdown()
    failed = [finding for finding in verdict.findings if finding.status == ERROR]
    if failed:
        raise SystemExit(f"{len(failed)} cases ended with an error, as: {failed[0].reason}")
    return {"cases": len(plan.cases), "work": sum(watch.seconds), **rate_of(watch.times)}


def rate_of(times: list[float]) -> dict[str, float]:
    """Seconds between the first finding and the last, and findings a second once all workers have started."""
    start = len(times) // 5
    return {"wall": times[-1] - times[0], "rate": (len(times) - 1 - start) / (times[-1] - times[start])}


class Watch:
    """When findings came, and how long their cases took."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.seconds: list[float] = []

    def __call__(self, work):
        """What `run_audit` enters."""
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def add(self, finding) -> None:
        """One finding."""
        self.times.append(time.perf_counter())
        self.seconds.append(float(finding.run["seconds"]))

    def report(self, stage: str, done: int, total: int) -> None:
        """Progress of an attack, which Ray does not tell."""


def small_plan(scratch: Path, num_cases: int) -> Path:
    """Gradients of a small Llama, four cases a seed: one and two texts, as they are and clipped."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(scratch / "model")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(scratch / "model")
    drawn = torch.randint(1, VOCAB, (TEXTS, 10), generator=torch.Generator().manual_seed(0)).tolist()
    (scratch / "texts.txt").write_text("\n".join(" ".join(f"w{token}" for token in text) for text in drawn))
    seeds = list(range(num_cases // 4))
    return write_plan(scratch / "small.toml", scratch / "model", ["none", "clip:norm=1"], [1, 2], seeds, "texts")


def real_plan(scratch: Path, num_cases: int) -> Path:
    """Gradients of SmolLM2-135M, one text a case."""
    return write_plan(scratch / "real.toml", REAL, ["none"], [1], list(range(num_cases)), "invented")


def write_plan(path: Path, model: object, defences: list[str], sizes: list[int], seeds: list[int], data: str) -> Path:
    """A plan of one group."""
    group = {"models": [str(model)], "data": [data], "batch_sizes": sizes, "seeds": seeds, "defences": defences}
    group |= {"attacks": ["bag-of-words"], "gates": []}
    lines = [f"{key} = {json.dumps(value)}" for key, value in group.items()]
    texts = '[data.texts]\nfile = "texts.txt"\n' if data == "texts" else ""
    path.write_text(texts + "\n".join(["[[gradients]]", *lines, ""]))
    return path
