"""DAGER's tables (arXiv 2405.15586) for GPT-2: ROUGE on CoLA, SST-2 and Rotten Tomatoes, batches of 1 to 8 texts.

python benchmarks/run.py gradients paper_tables [--rows base large] [--texts 1 2 4 8] [--batches 10] [--out FILE]
python benchmarks/run.py gradients paper_tables --model smollm2-135m   real weights (or gpt2, with a network)

The data is a folder with cola.tsv, sst2.tsv and rotten_tomatoes.tsv, one `sentence<TAB>label` a line; it is looked for
in ../shared/data beside the checkout. The paper's larger batches are --texts 16 32 64 128. Classification has the
paper's head (weights of deviation 1e-3, --head-scale). With --out every batch is written when it is done, and batches
that the file already holds are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from published import published
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from synthetic import gpt2_shape
from torch import Tensor
from transformers import AutoTokenizer

from unmask import observe_gradients, recover_text, score_texts
from unmask.models import Model, Role, adapt, load_model
from unmask.models.catalog import resolve

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SETS = {"cola": "CoLA", "sst2": "SST-2", "rotten_tomatoes": "Rotten Tomatoes"}
TASKS = {"classification": "classification", "next_token": "next token"}
NUM_RESAMPLES = 10_000
MIN_TOKENS = 2  # a text of one token has nothing to predict
UNKNOWN = "–"
PAPERS_HEAD_SCALE = 1e-3  # deviation of the paper's classification heads; transformers draws them with 0.02
# (row, task) → the paper's name of the model in its tables.
PAPERS_MODELS = {
    ("base", "classification"): "gpt2",
    ("base", "next_token"): "gpt2-nexttoken",
    ("large", "classification"): "gpt2-large",
}
# (row, task, set, texts) → the paper's (ROUGE-1, ROUGE-2) × 100.
PUBLISHED = {
    (row, task, set_name, num_texts): rouge
    for (row, task), name in PAPERS_MODELS.items()
    for (model_name, set_name, num_texts), rouge in published().items()
    if model_name == name
}
Example = tuple[list[int], int]  # tokens, label
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of the tables: which model, and how many batches unless told."""

    label: str
    load: Callable[[], Model]
    num_batches: int = 10


@dataclass(frozen=True)
class Spec:
    """One batch. Whatever changes its result is in here, so equal specs need no second run."""

    row: str
    task: str
    set: str
    texts: int
    batch: int
    seed: int
    whole_update: bool
    data_sha256: str
    head_scale: float | None = None  # of classification; None: the deviation that transformers draws heads with

    @property
    def cell(self) -> tuple[str, str, str, int]:
        """The line of the printed table that the batch counts in."""
        return self.row, self.task, self.set, self.texts

    @property
    def key(self) -> str:
        """A hash of the spec; those written before heads had a scale keep theirs."""
        fields = {name: value for name, value in asdict(self).items() if (name, value) != ("head_scale", None)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the batches that are missing, then print the table of all that were asked for."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = {options.model: Row(options.model, lambda: load_model(options.model))} if options.model else GPT2_ROWS
    names = [options.model] if options.model else options.rows
    sentences = {name: read_set(options.data / f"{name}.tsv") for name in options.sets}
    specs = plan(options, {name: rows[name] for name in names})
    results = open_results(options.out, options.resume)
    missing = [spec for spec in specs if spec.key not in results]
    with progress_bar(len(missing)) as advance:
        for name in names:
            todo = [spec for spec in missing if spec.row == name]
            if not todo:
                continue
            model = rows[name].load()
            encoded = {set_name: encode(model, pairs) for set_name, pairs in sentences.items()}
            for spec in todo:
                advance(f"{name}, {TASKS[spec.task]}, {SETS[spec.set]}, {spec.texts} texts, batch {spec.batch}", 0)
                result = measure(model, spec, encoded[spec.set])
                results[spec.key] = result
                append(options.out, result)
                advance("done", 1)
    print(report([results[spec.key] for spec in specs], {name: rows[name].label for name in names}, options.model))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, with mistakes told before anything is run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=GPT2_ROWS, default=["base"], help="GPT-2 shapes")
    parser.add_argument("--model", help="instead of the shapes: catalogue name, folder or Hugging Face name")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 2, 4, 8], help="texts in a batch")
    parser.add_argument("--batches", type=int, help="batches a cell (default: 10; large: 3; the paper: 100)")
    parser.add_argument("--seed", type=int, default=0, help="draws the batches, the labels' head and the resamples")
    parser.add_argument("--data", type=Path, default=SHARED_DATA)
    parser.add_argument("--out", type=Path, help="JSON lines, one a batch")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="keep what --out holds")
    parser.add_argument("--threads", type=int, help="of torch; one makes times on a shared machine comparable")
    parser.add_argument("--whole-update", action="store_true", help="all gradients, not only those the attack reads")
    parser.add_argument(
        "--head-scale", type=float, default=PAPERS_HEAD_SCALE, help="deviation of the classification head's weights"
    )
    options = parser.parse_args(arguments)
    for name in options.sets:
        if not (options.data / f"{name}.tsv").is_file():
            parser.error(f"{options.data} has no {name}.tsv; give the folder that holds it with --data, or use --sets")
    if min(options.texts) < 1 or (options.batches is not None and options.batches < 1):
        parser.error("--texts and --batches must be at least 1")
    return options


def plan(options: argparse.Namespace, rows: dict[str, Row]) -> list[Spec]:
    """Every batch that was asked for, in the order of the table."""
    digests = {name: _sha256(options.data / f"{name}.tsv") for name in options.sets}
    specs = [
        Spec(
            name,
            task,
            set_name,
            num_texts,
            batch,
            options.seed,
            options.whole_update,
            digests[set_name],
            options.head_scale if task == "classification" else None,
        )
        for name, row in rows.items()
        for task in options.tasks
        for set_name in options.sets
        for num_texts in options.texts
        for batch in range(options.batches or row.num_batches)
    ]
    return list(dict.fromkeys(specs))


# ---- models and data


def gpt2_row(label: str, num_blocks: int, num_batches: int = 10, **changes: int) -> Row:
    """GPT-2 at its true shape with random weights; the text is SmolLM2's tokenizer's, whose 49,152 tokens fit in."""

    def load() -> Model:
        tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2-135m"), local_files_only=True)
        return adapt(gpt2_shape(num_blocks, **changes).hf, tokenizer)

    return Row(label, load, num_batches)


GPT2_ROWS = {
    "base": gpt2_row("GPT-2 base shape", 12),
    "large": gpt2_row("GPT-2 large shape", 36, num_batches=3, n_embd=1280, n_head=20),
}


def read_set(path: Path) -> list[tuple[str, int]]:
    """Sentences with their labels."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        sentence, _, label = line.rstrip("\r").rpartition("\t")
        if not sentence or not label.isdecimal():
            raise SystemExit(f"{path}, line {number}: expected 'sentence<TAB>label', got {line[:60]!r}")
        pairs.append((sentence, int(label)))
    return pairs


def encode(model: Model, sentences: list[tuple[str, int]]) -> list[Example]:
    """Tokens and labels of the sentences that every task can train on."""
    examples = [(model.encode(sentence), label) for sentence, label in sentences]
    return [example for example in examples if len(example[0]) >= MIN_TOKENS]


def draw_batch(spec: Spec, examples: list[Example]) -> list[Example]:
    """The same sentences for every model and task, none of them twice."""
    if len(examples) < spec.texts:
        raise SystemExit(f"{spec.set} has {len(examples)} usable sentences, a batch of {spec.texts} needs more")
    generator = np.random.default_rng([spec.seed, zlib.crc32(spec.set.encode()), spec.texts, spec.batch])
    return [examples[index] for index in generator.choice(len(examples), size=spec.texts, replace=False)]


# ---- one batch


def measure(model: Model, spec: Spec, examples: list[Example]) -> Result:
    """Observe, attack what was observed, and only then compare with the truth."""
    texts, labels = zip(*draw_batch(spec, examples), strict=True)
    num_labels = max(2, 1 + max(label for _, label in examples))
    evidence = observe_gradients(
        model,
        texts,
        task=spec.task,
        labels=labels if spec.task == "classification" else None,
        num_labels=num_labels,
        head=None if spec.head_scale is None else draw_head(model, num_labels, spec.head_scale, spec.seed),
        parameters=None if spec.whole_update else parameters_that_are_read(model, spec.task),
        seed=spec.seed + spec.batch,
    )
    started, cpu_started = time.perf_counter(), time.process_time()
    recovered = recover_text(evidence, model)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    score = score_texts(recovered.value.expand(), texts, model.decode)
    return {
        "key": spec.key,
        "spec": asdict(spec),
        "tokens": sum(map(len, texts)),
        "rouge1": score.rouge1,
        "rouge2": score.rouge2,
        "exact_rate": score.exact_rate,
        "num_false": score.num_false,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "status": recovered.status.name,
        "reason": recovered.reason,
        "certificate_holds": recovered.certificate.holds,
        "used": list(recovered.used),
        "machine": machine(),
    }


def draw_head(model: Model, num_labels: int, scale: float, seed: int) -> Tensor:
    """A classification head of Gaussian weights (labels, d)."""
    return scale * torch.randn(num_labels, model.width, generator=torch.Generator().manual_seed(seed))


def parameters_that_are_read(model: Model, task: str) -> list[str]:
    """The first block, the last down projection and, where it tells tokens apart, the embedding.

    The whole update of GPT-2 large is 3 GB. A tied embedding moves in every row under next-token training.
    """
    layers = [model.linear(role, 0) for role in Role] + [model.linear(Role.MLP_OUT, model.num_blocks - 1)]
    names = [layer.parameter for layer in layers if layer is not None]
    if task == "classification" or model.unembedding_name != model.token_embedding:
        names += [name for name in (model.token_embedding, model.position_embedding) if name is not None]
    return list(dict.fromkeys(names))


# ---- the results file


def open_results(path: Path | None, resume: bool) -> dict[str, Result]:
    """What the file holds, by key; a line that a killed run left unfinished is cut off."""
    if path is None:
        return {}
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.read_bytes() if resume and path.is_file() else b""
    whole = held[: held.rfind(b"\n") + 1]
    if not path.is_file() or path.stat().st_size != len(whole):
        path.write_bytes(whole)
    results = (json.loads(line) for line in whole.splitlines())
    return {result["key"]: result for result in results}


def append(path: Path | None, result: Result) -> None:
    """One line, on the disk before the next batch starts."""
    if path is None:
        return
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(result, allow_nan=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


# ---- the report


def report(results: Sequence[Result], labels: dict[str, str], model: str | None) -> str:
    """A header, the table in Markdown, and what was not exact."""
    cells: defaultdict[tuple[str, str, str, int], list[Result]] = defaultdict(list)
    for result in results:
        cells[_spec(result).cell].append(result)
    weights = "its own weights and tokenizer" if model else "true shape, random weights, SmolLM2's tokenizer"
    machines = sorted({result["machine"] for result in results})
    lines = [
        f"DAGER's tables (arXiv 2405.15586): {', '.join(labels.values())}; {weights}; float32, dropout off.",
        *(f"Machine: {name}." for name in machines),
        f"The update: {_update(results)}.",
        "The adversary knows the model, the task and the number of texts.",
        "ROUGE: × 100, mean over batches, 95 % bootstrap interval (zero wide where all batches agree, however few).",
        "Exact: texts recovered token by token, in %. Seconds (elapsed and CPU): the attack alone, median.",
        "Paper: DAGER's ROUGE-1 / ROUGE-2 on the pretrained model (its Tables 1 to 3, 100 batches a cell).",
        "",
        "| model | task | set | texts | batches | ROUGE-1 | ROUGE-2 | exact, % | s/batch | CPU s | paper |",
        "| --- | --- | --- | --: | --: | --- | --- | --: | --: | --: | --: |",
        *(_line(cell, held, labels) for cell, held in cells.items()),
        "",
        *_not_exact(results),
    ]
    return "\n".join(lines)


def _line(cell: tuple[str, str, str, int], results: list[Result], labels: dict[str, str]) -> str:
    row, task, set_name, num_texts = cell
    seed = results[0]["spec"]["seed"]
    published = PUBLISHED.get(cell)
    columns = [
        labels[row],
        TASKS[task],
        SETS[set_name],
        str(num_texts),
        str(len(results)),
        *(mean_with_interval([100 * result[name] for result in results], seed) for name in ("rouge1", "rouge2")),
        f"{100 * statistics.fmean(result['exact_rate'] for result in results):.1f}",
        *(f"{statistics.median(result[name] for result in results):.2f}" for name in ("seconds", "cpu_seconds")),
        UNKNOWN if published is None else f"{published[0]:.1f} / {published[1]:.1f}",
    ]
    return f"| {' | '.join(columns)} |"


def mean_with_interval(values: list[float], seed: int) -> str:
    """The mean, with its bootstrap interval where there are several values."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    low, high = bootstrap_interval(values, np.random.default_rng(seed))
    return f"{statistics.fmean(values):.1f} [{low:.1f}, {high:.1f}]"


def bootstrap_interval(values: Sequence[float], generator: np.random.Generator) -> tuple[float, float]:
    """The middle 95 % of the means of batches drawn again with replacement."""
    drawn = generator.integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def _not_exact(results: Sequence[Result]) -> list[str]:
    """Batches with a text missed or made up, or of another status than RECOVERED; exact ones with a lower ROUGE."""
    lines = []
    for result in results:
        cell = "{row}, {task}, {set}, {texts} texts, batch {batch}".format(**result["spec"])
        rate, num_false = result["exact_rate"], result["num_false"]
        if rate < 1 or num_false or result["status"] != "RECOVERED" or not result["certificate_holds"]:
            lines.append(f"- {cell}: {rate:.0%} exact, {num_false} false; {result['status']}: {result['reason']}")
        elif min(result["rouge1"], result["rouge2"]) < 1:
            lines.append(f"- {cell}: exact, but a text of a single word has no bigram, so ROUGE-2 counts 0 for it")
    return ["Not exact:", *lines] if lines else ["Every batch was recovered exactly, and its certificate holds."]


def _update(results: Sequence[Result]) -> str:
    if any(result["spec"]["whole_update"] for result in results):
        return "all parameters"
    return "block 0, the last down projection, with classification the embeddings too (the paper reads blocks 0 and 1)"


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar over batches on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=total)

        def advance(what: str, done: int) -> None:
            bar.update(task, description=what, advance=done)

        yield advance


def _spec(result: Result) -> Spec:
    return Spec(**result["spec"])


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
