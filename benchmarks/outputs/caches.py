"""Prompts read from a block's cached keys and values: how many are exact, how fast, and what must not be read.

python benchmarks/run.py outputs caches              blocks × storage types: exact, false, candidates, tokens a second
python benchmarks/run.py outputs cache-parts         keys alone, values alone, some of the heads
python benchmarks/run.py outputs cache-control       random, shuffled and cloaked caches, other weights: nothing certain
python benchmarks/run.py outputs known-beginning     coarse hidden states with and without a known beginning

Prompts: --data FILE.tsv (first column; texts of at least --tokens tokens, cut to that; --skip leaves the first ones
out), otherwise invented sentences, joined. Seconds are of CPU time, one thread; the fitting of a block (once a model)
is not in them and has a column of its own. Every mode writes --out (benchmarks/results/outputs_MODE.json) after each
row; --resume goes on behind the rows that are there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from machine import machine
from outputs.prompts import tell, texts_of
from outputs.rows import Row, measure_rows

from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.attacks.recover import recover_text
from unmask.defences.table import defend_states, parse_defence
from unmask.evidence import CacheEvidence, HiddenEvidence
from unmask.models import Model, load_model
from unmask.models.readouts import STREAM, CacheReadout, Readout
from unmask.protocols.caches import observe_cache
from unmask.protocols.hidden import observe_hidden

RESULTS = Path(__file__).parents[1] / "results"
DEFAULTS = {
    "caches": {"layers": [0, 6, 15, 29], "prompts": 20, "tokens": 24},
    "cache-parts": {"layers": [0, 6, 15, 29], "prompts": 20, "tokens": 24},
    "cache-control": {"layers": [0, 6, 15], "prompts": 2, "tokens": 8},
    "known-beginning": {"layers": [15, 20], "prompts": 8, "tokens": 16},
}
STORAGES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
BEGINNING = "You are a helpful assistant. The user says: "
SHARES = {"keys": ("keys", 1.0), "values": ("values", 1.0), "half the heads": ("both", 0.5)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON after every row."""
    options = parse(arguments)
    torch.set_num_threads(1)
    print(machine(), flush=True)
    model = load_model(options.model, device=options.device)
    measure_rows(MODES[options.mode](model, options), options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options with the mode's defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue")
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--storages", nargs="+", default=list(STORAGES), choices=STORAGES)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--tokens", type=int, help="tokens a prompt")
    parser.add_argument("--data", type=Path, help="TSV file, texts in its first column; default: invented texts")
    parser.add_argument("--skip", type=int, default=0, help="texts of the file that are left out, of the long enough")
    parser.add_argument("--max-candidates", type=int, default=2048, help="cache-control: the budget a position")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path)
    known, _ = parser.parse_known_args(arguments)
    parser.set_defaults(out=RESULTS / f"outputs_{known.mode.replace('-', '_')}.json", **DEFAULTS[known.mode])
    return parser.parse_args(arguments)


def storages(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Every block in every type."""
    for layer in options.layers:
        for storage in options.storages:
            yield (
                lambda layer=layer, storage=storage: measure(model, options, layer=layer, dtype=storage),
                {"block": layer, "storage": storage},
            )


def parts(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Less than a block keeps, in int8 as far as `--storages` says so."""
    for layer in options.layers:
        for name, (kept, share) in SHARES.items():
            for storage in options.storages:
                number = max(1, int(share * model.num_key_value_heads))
                seen = {"layer": layer, "dtype": storage, "parts": kept, "heads": tuple(range(number))}
                yield (
                    lambda seen=seen: measure(model, options, **seen),
                    {"block": layer, "seen": name, "heads": number, "storage": storage},
                )


def measure(model: Model, options: argparse.Namespace, **seen: object) -> dict:
    """One cell: prompts one by one, as a user reads them."""
    prompts = texts_of(model, options, options.prompts)
    evidence = [observe_cache(model, [prompt], **seen) for prompt in prompts]  # type: ignore[arg-type]
    fitting = fit(model, evidence[0].layer, readout_of(evidence[0]))
    return {**compare(model, evidence, prompts), "fitting, s": fitting}


def readout_of(evidence: CacheEvidence) -> Readout:
    """What the attack sees of the stream."""
    return CacheReadout(evidence.layer, evidence.heads, evidence.keys is not None, evidence.values is not None)


def fit(model: Model, layer: int, readout: Readout) -> float:
    """CPU seconds of the one-off fitting."""
    started = time.process_time()
    templates_for(model, layer, readout, tell)
    return time.process_time() - started


def compare(
    model: Model,
    evidence: Sequence[CacheEvidence | HiddenEvidence],
    prompts: Sequence[list[int]],
    beginning: Sequence[int] | None = None,
    attack: str | None = None,
) -> dict:
    """What was read beside what was sent; tokens that were given do not count."""
    exact = false = right = certain = false_tokens = candidates = total = 0
    seconds = 0.0
    statuses: dict[str, int] = {}
    for one, prompt in zip(evidence, prompts, strict=True):
        started = time.process_time()
        recovery = recover_text(one, model, attack=attack, known_beginning=beginning, progress=tell)
        seconds += time.process_time() - started
        statuses[recovery.status.name] = statuses.get(recovery.status.name, 0) + 1
        candidates += recovery.cost.candidates
        total += len(prompt)
        exact += any(list(text.tokens) == prompt for text in recovery.value.texts)
        false += sum(list(text.tokens) != prompt for text in recovery.value.certain)
        false_tokens += len(recovery.value.token_set - set(prompt))
        certain += len(recovery.value.token_set)
        for text in recovery.value.texts:
            pairs = list(zip(text.tokens, prompt, strict=False))[text.num_given :]
            right += sum(ours == theirs for ours, theirs in pairs)
    given = 0 if beginning is None else len(beginning) * len(prompts)
    return {
        "prompts exact": f"{exact} of {len(prompts)}",
        "false texts": false,
        "false tokens": false_tokens,
        "tokens right": right / (total - given),
        "certain tokens": certain,
        "candidates a token": candidates / (total - given),
        "tokens a second": (total - given) / seconds,
        "status": statuses,
    }


def controls(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Caches that say nothing of a text."""
    for layer in options.layers:
        for name, spoil in CONTROLS.items():
            for storage in ("float32", "int8"):
                seen = {"layer": layer, "dtype": storage}
                yield (
                    lambda seen=seen, spoil=spoil: control(model, options, seen, spoil),
                    {"block": layer, "cache": name, "storage": storage},
                )


Spoil = Callable[[CacheEvidence, Model, Sequence[list[int]], torch.Generator], CacheEvidence]


def control(model: Model, options: argparse.Namespace, seen: dict, spoil: Spoil) -> dict:
    """Prompts whose caches were spoiled."""
    prompts = texts_of(model, options, options.prompts)
    generator = torch.Generator().manual_seed(options.seed)
    evidence = [spoil(observe_cache(model, [prompt], **seen), model, [prompt], generator) for prompt in prompts]
    return compare(model, evidence, prompts, attack=f"cache:max_candidates={options.max_candidates}")


def at_random(
    evidence: CacheEvidence, model: Model, prompts: Sequence[list[int]], generator: torch.Generator
) -> CacheEvidence:
    """Each head's norm is kept, and nothing else."""

    def noise(part: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(part.shape, generator=generator).to(part)
        return drawn * (part.norm(dim=-1) / drawn.norm(dim=-1))[..., None]

    return replace(evidence, **{name: noise(part) for name, part in evidence.parts.items()})


def of_other_weights(
    evidence: CacheEvidence, model: Model, prompts: Sequence[list[int]], generator: torch.Generator
) -> CacheEvidence:
    """The cache of a model whose projections are off by a tenth."""
    other = model.to()
    with torch.no_grad():
        for _, parameter in other.named_parameters():
            if parameter.ndim == 2:
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter += 0.1 * parameter.std() * drawn
    foreign = observe_cache(other, prompts, layer=evidence.layer)
    return replace(evidence, keys=foreign.keys, values=foreign.values)


def shuffled(
    evidence: CacheEvidence, model: Model, prompts: Sequence[list[int]], generator: torch.Generator
) -> CacheEvidence:
    """Positions in another order, none where it was."""
    order = torch.arange(evidence.mask.shape[1]).roll(3)
    return replace(evidence, **{name: part[:, order] for name, part in evidence.parts.items()})


def cloaked(
    evidence: CacheEvidence, model: Model, prompts: Sequence[list[int]], generator: torch.Generator
) -> CacheEvidence:
    """Behind the defence 'cloak'."""
    return defend_states(evidence, parse_defence("cloak"), generator)


CONTROLS: dict[str, Spoil] = {
    "random": at_random,
    "other weights": of_other_weights,
    "shuffled positions": shuffled,
    "cloak": cloaked,
}


def beginnings(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Hidden states in int8, read with nothing known, behind a known beginning, and behind a wrong one."""
    tokens = model.encode(BEGINNING)
    wrong = model.encode("Once upon a time there was")
    for layer in options.layers:
        for name, known in (("nothing", None), ("the beginning", tokens), ("a wrong beginning", wrong)):
            yield (
                lambda layer=layer, known=known: begun(model, options, layer, tokens, known),
                {"layer": layer, "states": "int8", "known": name},
            )


def begun(model: Model, options: argparse.Namespace, layer: int, beginning: list[int], known: list[int] | None) -> dict:
    """Texts with one beginning."""
    prompts = [[*beginning, *prompt] for prompt in texts_of(model, options, options.prompts)]
    generator = torch.Generator().manual_seed(options.seed)
    states = [observe_hidden(model, [prompt], layer=layer) for prompt in prompts]
    evidence = [defend_states(each, parse_defence("int8"), generator) for each in states]
    fit(model, layer, STREAM)
    return compare(model, evidence, prompts, known, f"prompt:max_candidates={options.max_candidates}")


MODES = {"caches": storages, "cache-parts": parts, "cache-control": controls, "known-beginning": beginnings}


if __name__ == "__main__":
    main()
