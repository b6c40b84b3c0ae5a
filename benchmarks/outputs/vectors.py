"""Texts read from stored embeddings: how many are exact, how fast, and what must not be read.

python benchmarks/run.py outputs vectors             lengths × storage types: exact, certain, false, seconds a text
python benchmarks/run.py outputs vector-control      random vectors, other weights, mixed and shuffled ones: no claim
python benchmarks/run.py outputs vector-rate         texts embedded a second: the search beside the model alone

Texts: --data FILE.tsv (first column; evenly spaced among those of the right length; --skip leaves out the first of
these), otherwise invented sentences. Vectors are attacked one after the other (CPU) or in batches (CUDA); the fit of
the model, once a model, is not in the seconds. Every mode writes --out after each row; --resume goes on behind them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from machine import machine
from outputs.encoders import read_lines
from outputs.prompts import tell
from outputs.rows import Row, measure_rows

from unmask.attacks.outputs.vectors.attack import EmbeddingAttack
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.recover import recover_text
from unmask.evidence.vectors import VectorEvidence
from unmask.models import Model, load_model
from unmask.models.pooling import recipe_of
from unmask.protocols.vectors import observe_vectors

RESULTS = Path(__file__).parents[1] / "results"
LENGTHS = ("5-8", "9-16", "17-32")
STORAGES = ("float32", "float16", "int8")
CONTROLS = ("random", "other weights", "halves of two", "shuffled")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON after every row."""
    options = parse(arguments)
    print(machine(), flush=True)
    model = load_model(options.model, device=options.device)
    measure_rows(MODES[options.mode](model, options), options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of all modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", default="minilm-l6", help="a name of the catalogue")
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), help="tokens of a text, '5-8'")
    parser.add_argument("--storages", nargs="+", default=list(STORAGES))
    parser.add_argument("--controls", nargs="+", default=list(CONTROLS), choices=CONTROLS)
    parser.add_argument("--texts", type=int, default=20, help="of each row")
    parser.add_argument("--data", type=Path, help="TSV file, texts in its first column; default: invented texts")
    parser.add_argument("--skip", type=int, default=0, help="texts of each length that are left out")
    parser.add_argument("--attack", default="default", help="with settings that bound its budget")
    parser.add_argument("--effort", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path)
    known, _ = parser.parse_known_args(arguments)
    parser.set_defaults(out=RESULTS / f"outputs_{known.mode.replace('-', '_')}.json")
    return parser.parse_args(arguments)


def choose_texts(model: Model, options: argparse.Namespace, length: str) -> list[tuple[int, ...]]:
    """Texts of some length, evenly spaced in the file, without the tokens that frame every text."""
    low, high = map(int, length.split("-"))
    opening, closing = model.special_frame
    framed = (model.encode(line) for line in dict.fromkeys(read_lines(options.data, 0, 10**6)))
    tokens = [tuple(line[len(opening) : len(line) - len(closing)]) for line in framed]
    fitting = [text for text in dict.fromkeys(tokens) if low <= len(text) <= high][options.skip :]
    return fitting[:: max(1, len(fitting) // options.texts)][: options.texts]


def storages(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Every length in every type."""
    for length in options.lengths:
        for storage in options.storages:
            yield (
                lambda length=length, storage=storage: measure(model, options, length, storage),
                {"tokens": length, "stored as": storage},
            )


def measure(model: Model, options: argparse.Namespace, length: str, storage: str) -> dict:
    """One cell: vectors one by one, or together on a GPU."""
    opening, closing = model.special_frame
    texts = [(*opening, *text, *closing) for text in choose_texts(model, options, length)]
    evidence = observe_vectors(model, texts, dtype=storage)
    recover_text(evidence.select([0]), model, attack=EmbeddingAttack(max_texts=1, max_attempts=1), progress=tell)
    exact = certain = false = embedded = 0
    seconds, overlaps = [], []
    for part in split(options, len(texts)):
        started = time.perf_counter()
        recovery = recover_text(
            evidence.select(part), model, attack=options.attack, effort=options.effort, progress=tell
        )
        seconds.append((time.perf_counter() - started) / len(part))
        embedded += recovery.cost.forward_passes
        found = {text.row: text for text in recovery.value.texts}
        for row, place in enumerate(part):
            text = found.get(row)
            tokens = text.tokens if text else ()
            exact += tokens == texts[place]
            certain += bool(text and text.certain)
            false += bool(text and text.certain and tokens != texts[place])
            overlaps.append(overlap(tokens, texts[place], opening + closing))
    return {
        "texts": len(texts),
        "exact": exact,
        "certain": certain,
        "false": false,
        "token F1": statistics.mean(overlaps),
        "median seconds": statistics.median(seconds),
        "mean seconds": statistics.mean(seconds),
        "texts embedded": embedded // len(texts),
    }


def split(options: argparse.Namespace, num_texts: int) -> list[list[int]]:
    """Vectors that are attacked in one call: one, or all on a GPU."""
    places = list(range(num_texts))
    return [[place] for place in places] if options.device == "cpu" else [places]


def overlap(found: Sequence[int], true: Sequence[int], frame: Sequence[int]) -> float:
    """F1 of two bags of tokens, without those that frame every text."""
    one, other = (Counter(token for token in tokens if token not in frame) for tokens in (found, true))
    return 2 * (one & other).total() / max(1, one.total() + other.total())


def controls(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Vectors that are no text's."""
    for name in options.controls:
        yield lambda name=name: measure_control(model, options, name), {"vectors": name}


def measure_control(model: Model, options: argparse.Namespace, name: str) -> dict:
    """How many are claimed: none may be."""
    opening, closing = model.special_frame
    texts = [(*opening, *text, *closing) for text in choose_texts(model, options, options.lengths[0])]
    evidence = spoil(observe_vectors(model, texts), model, texts, name, options.seed)
    claimed = statuses = 0
    for part in split(options, len(texts)):
        recovery = recover_text(evidence.select(part), model, attack=options.attack, progress=tell)
        claimed += len(recovery.value.certain) + len(recovery.value.token_set)
        statuses += recovery.status.conclusive
    return {"number": len(texts), "claimed": claimed, "conclusive": statuses}


def spoil(evidence: VectorEvidence, model: Model, texts: Sequence, name: str, seed: int) -> VectorEvidence:
    """Vectors of the same kind that belong to no text of this model."""
    generator = torch.Generator().manual_seed(seed)
    vectors = evidence.vectors
    if name == "random":
        changed = torch.randn(vectors.shape, generator=generator).to(vectors)
    elif name == "other weights":
        other = model.to()
        with torch.no_grad():
            for weights in other.hf.parameters():
                weights.add_(0.05 * weights.std() * torch.randn(weights.shape, generator=generator).to(weights))
        changed = observe_vectors(other, texts).vectors
    elif name == "halves of two":
        half = vectors.shape[1] // 2
        changed = torch.cat([vectors[:, :half], vectors.roll(1, 0)[:, half:]], 1)
    else:
        changed = vectors[:, torch.randperm(vectors.shape[1], generator=generator)]
    changed = torch.nn.functional.normalize(changed, dim=1) if evidence.recipe.normalise else changed
    return evidence.with_tensors(dict(zip(evidence.named_tensors(), changed, strict=True)))


def rate(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Texts embedded a second."""
    for length in options.lengths:
        yield lambda length=length: measure_rate(model, options, length), {"tokens": length}


def measure_rate(model: Model, options: argparse.Namespace, length: str) -> dict:
    """The search beside forward passes alone, in the search's own precision."""
    low, high = map(int, length.split("-"))
    found = measure(model, options, length, "float32")
    embedder = Embedder(model, recipe_of(model))
    tokens = torch.randint(0, model.vocab_size, (16_384, (low + high) // 2), device=model.device)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < 5:
        count += len(embedder(TextBatch(tokens[: 16_384 if options.device != "cpu" else 512])))
        float(embedder(TextBatch(tokens[:1])).sum())  # waits for the device
    alone = count / (time.perf_counter() - started)
    searched = found["texts embedded"] / found["mean seconds"]
    return {"alone, texts/s": alone, "search, texts/s": searched, "share": searched / alone}


MODES = {"vectors": storages, "vector-control": controls, "vector-rate": rate}

if __name__ == "__main__":
    main()
