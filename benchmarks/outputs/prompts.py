"""Prompts read from hidden states: how many are exact, how fast, against other searches, and what noise leaves.

python benchmarks/run.py outputs exact              texts and random tokens: exact, candidates, tokens a second
python benchmarks/run.py outputs against-gradient   ours, SipIt-style search and a vocabulary scan, interleaved
python benchmarks/run.py outputs coarse             states stored coarsely or with noise: right, certain, false
python benchmarks/run.py outputs control            noise of the states' norms: nothing may be claimed

Prompts: --data FILE.tsv (first column; texts of at least --tokens tokens, cut to that; --skip leaves the first ones
out), otherwise invented sentences, joined. Seconds are of CPU time, one thread, so that a busy machine does not enter;
the fitting of a layer (once a model) is not in them and has a column of its own. Every mode writes --out
(benchmarks/results/outputs_prompts_MODE.json).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import torch
from invented import invented
from machine import machine
from outputs.gradient_search import GradientSearch, Position, best_step, scan_rate
from torch import Tensor

from unmask.attacks.outputs.prompts import attack as prompt_attack
from unmask.attacks.outputs.prompts import reader as prompt_reader
from unmask.attacks.outputs.prompts.attack import PromptAttack
from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.position_search import FoundToken, Observation
from unmask.attacks.outputs.prompts.reader import PromptReader, ReadText
from unmask.attacks.outputs.prompts.side_by_side import Reading
from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.evidence import HiddenEvidence
from unmask.models import Model, load_model
from unmask.protocols.hidden import observe_hidden
from unmask.recovery import RecoveredTexts, Recovery

RESULTS = Path(__file__).parents[1] / "results"
Prompt = list[int]
Distortion = Callable[[Tensor, torch.Generator], Tensor]
MANY = 500  # candidates at one position that are worth a line
DEFAULTS = {
    "exact": {"layers": [6, 15, 30], "prompts": 20, "random": 4, "tokens": 30},
    "against-gradient": {"layers": [30], "prompts": 3, "random": 0, "tokens": 30},
    "coarse": {"layers": [6, 15, 30], "prompts": 3, "random": 0, "tokens": 6},
    "control": {"layers": [6, 15, 30], "prompts": 4, "random": 0, "tokens": 6, "max_candidates": 2048},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON after every row."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    print(machine(), flush=True)
    model = load_model(options.model, device=options.device)
    kept = {name: value for name, value in vars(options).items() if name not in ("data", "out")}
    kept["data"] = options.data and options.data.name
    rows: list[dict] = []
    for row in MODES[options.mode](model, options):
        rows.append(row)
        document = {"machine": machine(), "mode": options.mode, "seed": options.seed, "arguments": kept, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print("\n" + markdown(rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options with the mode's defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalogue")
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--prompts", type=int, help="texts; control: trials a layer")
    parser.add_argument("--random", type=int, help="prompts of random tokens beside them")
    parser.add_argument("--tokens", type=int, help="tokens a prompt")
    parser.add_argument("--data", type=Path, help="TSV file, texts in its first column; default: invented texts")
    parser.add_argument("--skip", type=int, default=0, help="texts of the file that are left out, of the long enough")
    parser.add_argument(
        "--max-candidates",
        type=int,
        help="the attack's budget a position; default: control 2048, otherwise none",
    )
    parser.add_argument("--baseline-positions", type=int, default=8, help="against-gradient: spread over each prompt")
    parser.add_argument("--baseline-steps", type=int, default=200, help="against-gradient: most steps a position")
    parser.add_argument("--step-sizes", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="against-gradient")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--states", nargs="+", choices=DISTORTIONS, help="coarse: only these; all by default")
    parser.add_argument("--out", type=Path)
    known, _ = parser.parse_known_args(arguments)
    name = f"outputs_prompts_{known.mode.replace('-', '_')}.json"
    parser.set_defaults(**{"out": RESULTS / name, **DEFAULTS[known.mode]})
    return parser.parse_args(arguments)


# Prompts


def texts_of(model: Model, options: argparse.Namespace, count: int) -> list[Prompt]:
    """Prompts of `--tokens` tokens, from the file or invented."""
    if options.data is None:
        long_enough = joined(model, options.tokens, options.skip + count)
    else:
        encoded = (model.encode(line.split("\t")[0]) for line in options.data.read_text().splitlines())
        long_enough = [tokens for tokens in encoded if len(tokens) >= options.tokens]
    chosen = long_enough[options.skip : options.skip + count]
    if len(chosen) < count:
        raise SystemExit(f"{options.data} has {len(long_enough)} texts of {options.tokens} tokens; {count} were wanted")
    return [list(tokens[: options.tokens]) for tokens in chosen]


def joined(model: Model, num_tokens: int, count: int) -> list[Prompt]:
    """Invented sentences, put together until they are long enough."""
    prompts: list[Prompt] = []
    sentences: list[str] = []
    for sentence in invented(count * num_tokens):
        sentences.append(sentence)
        if len(model.encode(" ".join(sentences))) >= num_tokens:
            prompts.append(model.encode(" ".join(sentences)))
            sentences = []
        if len(prompts) == count:
            break
    return prompts


def prompts_of(model: Model, options: argparse.Namespace) -> dict[str, list[Prompt]]:
    """Prompts by their kind."""
    drawn = random.Random(options.seed)
    kinds = {"text": texts_of(model, options, options.prompts)} if options.prompts else {}
    if options.random:
        kinds["random"] = [
            [drawn.randrange(model.vocab_size) for _ in range(options.tokens)] for _ in range(options.random)
        ]
    return kinds


# The attack, watched


@dataclass
class Watched:
    """What the attack knows of each token beside its report: certainty, distances, candidates of each search."""

    texts: list[ReadText] = field(default_factory=list)
    searches: list[dict] = field(default_factory=list)
    recovery: Recovery[RecoveredTexts] | None = None
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def num_candidates(self) -> int:
        """Over all texts."""
        return sum(text.num_candidates for text in self.texts)

    @property
    def status(self) -> str:
        """How the attack ended."""
        return self.recovery.status.name if self.recovery else ""


@contextmanager
def recorded(seen: Watched) -> Iterator[None]:
    """Let the reader's results pass through a list."""
    read, find = prompt_attack.read_texts, prompt_reader.find_token

    def read_texts(
        reader: PromptReader, readings: Callable[[PromptReader], Iterable[Reading[ReadText]]]
    ) -> list[ReadText]:
        texts = read(reader, readings)
        seen.texts += texts
        return texts

    def find_token(sighting: Observation, text: Continuation, *arguments: object) -> Reading[FoundToken]:
        found = yield from find(sighting, text, *arguments)  # type: ignore[arg-type]
        costs = {"candidates": found.num_candidates, "jacobians": found.num_jacobians}
        seen.searches.append({"position": text.num_known, **costs})
        return found

    with (
        patch.object(prompt_attack, "read_texts", read_texts),
        patch.object(prompt_reader, "find_token", find_token),
    ):
        yield


def attacked(evidence: HiddenEvidence, model: Model, max_candidates: int | None) -> Watched:
    """Run the attack as a user does, with a clock and a record."""
    seen = Watched()
    wall, cpu = time.perf_counter(), time.process_time()
    with recorded(seen):
        seen.recovery = PromptAttack(max_candidates=max_candidates)(evidence, model, tell)
    seen.cpu_seconds, seen.wall_seconds = time.process_time() - cpu, time.perf_counter() - wall
    return seen


def tell(stage: str, done: int, total: int) -> None:
    """Progress on stderr."""
    print(f"\r{stage} {done}/{total}".ljust(60), end="", file=sys.stderr, flush=True)


def fit(model: Model, layer: int) -> float:
    """CPU seconds of the one-off fitting."""
    started = time.process_time()
    templates_for(model, layer, progress=tell)
    return time.process_time() - started


def compared(seen: Watched, prompts: Sequence[Prompt]) -> dict:
    """What was read beside what was sent."""
    pairs = [
        (number, place, read, prompt[place])
        for number, (text, prompt) in enumerate(zip(seen.texts, prompts, strict=True))
        for place, read in enumerate(text.tokens)
    ]
    tokens = sum(map(len, prompts))
    certain = [pair for pair in pairs if pair[2].certain]
    return {
        "prompts": len(prompts),
        "exact": sum(tuple(t.token for t in a.tokens) == tuple(b) for a, b in zip(seen.texts, prompts, strict=True)),
        "tokens": tokens,
        "right": sum(read.token == sent for _, _, read, sent in pairs) / tokens,
        "certain": len(certain) / tokens,
        "certain but false": [
            {"prompt": number, "position": place, "read": read.token, "sent": sent, "distance": read.distance}
            for number, place, read, sent in certain
            if read.token != sent
        ],
        "status": seen.status,
    }


# Modes


def exact(model: Model, options: argparse.Namespace) -> Iterator[dict]:
    """Texts and random tokens at each layer."""
    kinds = prompts_of(model, options)
    for layer in options.layers:
        fit_seconds = fit(model, layer)
        for kind, prompts in kinds.items():
            seen = attacked(observe_hidden(model, prompts, layer=layer), model, options.max_candidates)
            read = [token for text in seen.texts for token in text.tokens]
            result = compared(seen, prompts)
            tokens = result["tokens"]
            yield {
                "layer": layer,
                "kind": kind,
                **result,
                "candidates a token": seen.num_candidates / tokens,
                "Jacobians a token": sum(text.num_jacobians for text in seen.texts) / tokens,
                "tokens a second": tokens / seen.cpu_seconds,
                "fitting, s": fit_seconds,
                "worst residual": max((token.distance for token in read if token.certain), default=None),
                "nearest rejected": min((t.runner_up for t in read if t.runner_up is not None), default=None),
                "most candidates": max((search["candidates"] for search in seen.searches), default=0),
                f"positions over {MANY}": [search for search in seen.searches if search["candidates"] > MANY],
                "wall seconds": seen.wall_seconds,
                "reason": seen.recovery.reason if seen.recovery else "",
            }


def against_gradient(model: Model, options: argparse.Namespace) -> Iterator[dict]:
    """Prompt by prompt: ours on all of it, the baseline at positions spread over it."""
    *prompts, spare = texts_of(model, options, options.prompts + 1)
    where = spread(options.tokens, options.baseline_positions)
    for layer in options.layers:
        fit_seconds = fit(model, layer)
        rate = scan_rate(Continuation.start(model, layer))
        search, trials = tuned(model, layer, spare, where, options)
        ours: list[Watched] = []
        theirs: list[list[Position]] = []
        for prompt in prompts:
            evidence = observe_hidden(model, [prompt], layer=layer)
            ours.append(attacked(evidence, model, options.max_candidates))
            tell("searching by gradients", len(theirs), len(prompts))
            theirs.append(search.read(model, layer, prompt, evidence.states[0], where))
        seconds = sum(seen.cpu_seconds for seen in ours) / sum(map(len, prompts))
        yield {
            "layer": layer,
            "prompts": len(prompts),
            "ours, s a token": seconds,
            **gradient_columns(theirs, seconds, fit_seconds),
            "scan, expected s a token": model.vocab_size / 2 / rate,
            "scan by ours": model.vocab_size / 2 / rate / seconds,
            "scan candidates a second": rate,
            "ours found": sum(compared(seen, [prompt])["right"] for seen, prompt in zip(ours, prompts, strict=True))
            / len(prompts),
            "fitting, s": fit_seconds,
            "step size": search.step,
            "search": asdict(search),
            "step sizes tried": trials,
            "by prompt": [
                {"ours, s": seen.cpu_seconds, "gradient": [asdict(position) for position in positions]}
                for seen, positions in zip(ours, theirs, strict=True)
            ],
        }


def tuned(
    model: Model, layer: int, spare: Prompt, where: Sequence[int], options: argparse.Namespace
) -> tuple[GradientSearch, list[dict]]:
    """The baseline with the best step size on a few positions of a prompt that is not measured, a quarter as long."""
    states = observe_hidden(model, [spare], layer=layer).states[0]
    brief = GradientSearch(max_steps=max(1, options.baseline_steps // 4))
    step, trials = best_step(options.step_sizes, model, layer, spare, states, where[1:4] or where, brief)
    return GradientSearch(step, max_steps=options.baseline_steps), trials


def gradient_columns(theirs: Sequence[Sequence[Position]], ours_seconds: float, fit_seconds: float) -> dict:
    """The baseline's own numbers, and the number of tokens from which on the fitting has paid."""
    positions = list(itertools.chain(*theirs))
    seconds = sum(position.cpu_seconds for position in positions) / len(positions)
    saved = seconds - ours_seconds
    return {
        "gradient, s a token": seconds,
        "ratio": seconds / ours_seconds,
        "gradient found": sum(position.found for position in positions) / len(positions),
        "gradient positions": len(positions),
        "gradient steps a position": sum(position.num_steps for position in positions) / len(positions),
        "break-even, tokens": fit_seconds / saved if saved > 0 else None,
    }


def spread(length: int, count: int) -> list[int]:
    """Positions at even distances, the first one included."""
    return [index * length // count for index in range(min(count, length))]


def coarse(model: Model, options: argparse.Namespace) -> Iterator[dict]:
    """Each way of storing states, at each layer."""
    for layer in options.layers:
        for name in options.states or DISTORTIONS:
            distort = DISTORTIONS[name]
            yield {"layer": layer, "states": name, **distorted(model, layer, distort, options)}


def control(model: Model, options: argparse.Namespace) -> Iterator[dict]:
    """States replaced by noise of the same norm, token by token."""
    for layer in options.layers:
        yield {"layer": layer, **distorted(model, layer, nothing_but_noise, options)}


def distorted(model: Model, layer: int, distort: Distortion, options: argparse.Namespace) -> dict:
    """Prompts one by one, so that their statuses can be counted."""
    prompts = list(itertools.chain(*prompts_of(model, options).values()))
    generator = torch.Generator().manual_seed(options.seed)
    fit(model, layer)
    seen, statuses = Watched(), Counter[str]()
    for prompt in prompts:
        evidence = observe_hidden(model, [prompt], layer=layer)
        evidence = replace(evidence, states=distort(evidence.states, generator))
        one = attacked(evidence, model, options.max_candidates)
        seen.texts += one.texts
        seen.cpu_seconds += one.cpu_seconds
        statuses[one.status] += 1
    result = compared(seen, prompts) | {"status": dict(statuses)}
    per_token = {"candidates": seen.num_candidates, "s": seen.cpu_seconds}
    return result | {f"{name} a token": value / result["tokens"] for name, value in per_token.items()}


# How states are stored: (batch, length, d), each token on its own


def bfloat16(states: Tensor, generator: torch.Generator) -> Tensor:
    """Eight bits of mantissa."""
    return states.to(torch.bfloat16).to(states)


def float8(states: Tensor, generator: torch.Generator) -> Tensor:
    """e4m3, the largest entry of a token scaled to the largest number."""
    scale = states.abs().amax(2, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (states / scale).to(torch.float8_e4m3fn).to(states) * scale


def integers(bits: int) -> Distortion:
    """Whole numbers of so many bits, one scale a token."""

    def distort(states: Tensor, generator: torch.Generator) -> Tensor:
        scale = states.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)
        return (states / scale).round() * scale

    return distort


def gaussian(share: float) -> Distortion:
    """Noise whose expected norm is a share of each token's."""

    def distort(states: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(states.shape, generator=generator).to(states) / states.shape[2] ** 0.5
        return states + share * states.norm(dim=2, keepdim=True) * noise

    return distort


def nothing_but_noise(states: Tensor, generator: torch.Generator) -> Tensor:
    """Each token's norm is kept, and nothing else."""
    noise = torch.randn(states.shape, generator=generator).to(states)
    return noise * (states.norm(dim=2) / noise.norm(dim=2))[..., None]


DISTORTIONS: dict[str, Distortion] = {
    "bfloat16": bfloat16,
    "float8": float8,
    "int8": integers(8),
    "int4": integers(4),
    **{f"noise {share:.0%}": gaussian(share) for share in (0.01, 0.05, 0.1, 0.3, 1.0)},
}
MODES = {"exact": exact, "against-gradient": against_gradient, "coarse": coarse, "control": control}


def markdown(rows: Sequence[dict]) -> str:
    """A table of what fits into a cell; lists are counted, the rest is in the JSON."""
    names = [
        name for name, value in rows[0].items() if name not in ("reason", "search", "step sizes tried", "by prompt")
    ]
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(cell(row[name]) for name in names) + " |" for row in rows)])


def cell(value: object) -> str:
    """A value in few characters."""
    match value:
        case float():
            return f"{value:.3g}"
        case list():
            return str(len(value))
        case dict():
            return ", ".join(f"{count} {name}" for name, count in value.items())
        case None:
            return "–"
        case _:
            return str(value)


if __name__ == "__main__":
    main()
