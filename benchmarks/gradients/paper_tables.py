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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gradients.paper_clients import PAPERS_HEAD_SCALE, draw_head, parameters_that_are_read
from gradients.paper_report import TASKS, report
from machine import machine
from progress_bar import progress_bar
from result_lines import Result, append, open_results
from synthetic import gpt2_shape
from text_sets import SETS, SHARED_DATA, draw_batch, read_set, sha256_of
from transformers import AutoTokenizer

from unmask import observe_gradients, recover_text, score_texts
from unmask.models import Model, adapt, load_model
from unmask.models.catalog import resolve

MIN_TOKENS = 2  # a text of one token has nothing to predict
Example = tuple[list[int], int]  # tokens, label


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
    digests = {name: sha256_of(options.data / f"{name}.tsv") for name in options.sets}
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


def encode(model: Model, sentences: list[tuple[str, int]]) -> list[Example]:
    """Tokens and labels of the sentences that every task can train on."""
    examples = [(model.encode(sentence), label) for sentence, label in sentences]
    return [example for example in examples if len(example[0]) >= MIN_TOKENS]


# ---- one batch


def measure(model: Model, spec: Spec, examples: list[Example]) -> Result:
    """Observe, attack what was observed, and only then compare with the truth."""
    texts, labels = zip(*draw_batch(examples, spec.set, spec.texts, spec.batch, spec.seed), strict=True)
    num_labels = max(2, 1 + max(label for _, label in examples))
    evidence = observe_gradients(
        model,
        texts,
        task=spec.task,
        labels=labels if spec.task == "classification" else None,
        num_labels=num_labels,
        head=None if spec.head_scale is None else draw_head(model, num_labels, spec.head_scale, spec.seed),
        parameters=None if spec.whole_update else parameters_that_are_read(model),
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


if __name__ == "__main__":
    main()
