"""A 7B update on a CPU machine: peak memory of loading, recovering and confirming, tensor by tensor from the disk.

python benchmarks/run.py scale memory [--blocks 32] [--texts 2] [--folder FOLDER] [--keep] [--out results.json]

Writes a float32 model of the Llama-2-7B shape with random weights and a client's update of it into a folder (27 GB each
at 32 blocks), and runs each row in a process of its own. Peak memory is VmHWM, which counts mapped pages of files too;
beside it is the peak of anonymous memory, which the system cannot take back. A run that was stopped goes on with the
files that are whole. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import transformers
from machine import machine
from safetensors.torch import save_file
from synthetic import zipf_batch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import unmask
from unmask.evidence.files import write_by_tensor
from unmask.proof.gradient_visits import visit_gradients

WIDTH, HIDDEN, HEADS, VOCAB = 4096, 11008, 32, 32_000
STD = 0.02
LIMIT_GB = 6  # what a process is told that it may hold
ROWS = ("bag-of-words", "decoder")


def main() -> None:
    """Make what is missing, measure each row, print a table, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "unmask-scale-memory")
    parser.add_argument("--keep", action="store_true", help="leave the folder where it is")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", choices=["observe", *ROWS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(run_step(options.step, options.folder, options.blocks, options.texts)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"Llama-2-7B shape, {options.blocks} blocks, float32, {options.texts} texts; {machine()}")
    write_model(options.folder / "model", options.blocks)
    steps = ROWS if (options.folder / "update.safetensors").exists() else ("observe", *ROWS)
    print(f"{'step':<14}{'seconds':>8}{'peak GB':>9}{'anonymous GB':>14}{'update read GB':>16}{'exact':>9}  status")
    rows = []
    for step in steps:
        row = run_apart(step, options)
        rows.append(row)
        print(
            f"{row['step']:<14}{row['seconds']:>8.0f}{row['peak_gb']:>9.2f}{row['anonymous_gb']:>14.2f}"
            f"{row['read_gb']:>9.1f} of {row['update_gb']:>3.0f}{row['exact']:>9}  {row['status']}",
            flush=True,
        )
    if options.out:
        result = {"machine": machine(), "blocks": options.blocks, "texts": options.texts, "rows": rows}
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    if not options.keep:
        shutil.rmtree(options.folder)


def run_apart(step: str, options: argparse.Namespace) -> dict:
    """One step in a process of its own, so that its peak is its own."""
    script = [sys.executable, str(Path(__file__).parents[1] / "run.py"), "scale", "memory", "--step", step]
    sizes = ["--blocks", str(options.blocks), "--texts", str(options.texts), "--folder", str(options.folder)]
    memory = {"UNMASK_MEMORY_GB": str(LIMIT_GB)}
    done = subprocess.run(
        [*script, *sizes], stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **memory}
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_step(step: str, folder: Path, num_blocks: int, num_texts: int) -> dict:
    """Observe the client, or recover what it trained on; with the time and the peak memory."""
    texts = zipf_batch(num_texts, 13, 24, VOCAB, seed=num_texts, first=1)
    started, watch = time.perf_counter(), Watch()
    model = unmask.load_model(folder / "model")
    loaded = time.perf_counter() - started
    path = folder / "update.safetensors"
    row = {"step": step, "load_seconds": loaded, "exact": "", "status": "", "read_gb": 0.0}
    if step == "observe":
        write_update(model, texts, path)
    else:
        evidence = unmask.load_evidence(path)
        recovery = unmask.recover_text(evidence, model, attack=step)
        stored = evidence.gradients
        row["read_gb"] = getattr(stored, "num_bytes_read", 0) / 1e9
        row["status"] = f"{recovery.status.name}: {recovery.reason}"
        row["exact"] = count_exact(step, recovery, texts)
    row |= {"seconds": time.perf_counter() - started, "update_gb": path.stat().st_size / 1e9}
    return row | watch.stop()


def count_exact(step: str, recovery: unmask.Recovery, texts: list[list[int]]) -> str:
    """Texts that are exact and certain, of all; for the bag of words, tokens."""
    if step == "bag-of-words":
        held = {token for text in texts for token in text[:-1]}
        return f"{len(held & recovery.value.token_set)}/{len(held)}"
    found = Counter(text.tokens for text in recovery.value.certain)
    return f"{(found & Counter(map(tuple, texts))).total()}/{len(texts)}"


def write_model(folder: Path, num_blocks: int) -> None:
    """Random weights as transformers stores them, a block a file; files that are there are kept."""
    folder.mkdir(exist_ok=True)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_attention_heads=HEADS,
        num_hidden_layers=num_blocks,
        vocab_size=VOCAB,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in transformers.LlamaForCausalLM(config).named_parameters()}
    files = {name: _file_of(name) for name in shapes}
    for seed, file in enumerate(dict.fromkeys(files.values())):
        if not (folder / file).exists():
            generator = torch.Generator().manual_seed(seed)
            drawn = {n: _draw(n, shape, generator) for n, shape in shapes.items() if files[n] == file}
            save_file(drawn, folder / f"{file}.part", metadata={"format": "pt"})
            (folder / f"{file}.part").rename(folder / file)
    index = {"metadata": {"total_size": 4 * sum(s.numel() for s in shapes.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _file_of(name: str) -> str:
    part = f"block-{int(name.split('.')[2]):02d}" if ".layers." in name else "ends"
    return f"model-{part}.safetensors"


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator).mul_(STD)


def write_update(model: unmask.Model, texts: list[list[int]], path: Path) -> None:
    """The client's gradient, each tensor written when it is computed."""
    outlines = {name: (weight.dtype, tuple(weight.shape)) for name, weight in model.named_parameters()}
    header = {
        "model_fingerprint": model.fingerprint(),
        "task": "next_token",
        "num_texts": len(texts),
        "update": "gradient",
        "compute_dtype": "float32",
        "num_clients": 1,
        "all_tokens_predicted": True,
    }
    part = path.with_suffix(".part")
    writer = write_by_tensor(part, "gradients", outlines, header)
    visit_gradients(model, texts, frozenset(outlines), writer.put)
    writer.finish()
    part.rename(path)


class Watch:
    """The peak of this process: all resident pages, and those that are no file's."""

    def __init__(self) -> None:
        self.anonymous, self.is_over = 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.is_over.wait(0.02):
            self.anonymous = max(self.anonymous, _status("RssAnon"))

    def stop(self) -> dict[str, float]:
        """Both peaks in GB."""
        self.is_over.set()
        self.thread.join()
        return {"peak_gb": _status("VmHWM") / 1e9, "anonymous_gb": self.anonymous / 1e9}


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
