"""What attacks claim of the campaign's runs and of the contracts' recipes: stored before a change, compared after it.

    python benchmarks/goldens.py store runs/goldens.jsonl --runs gradients=800 states=300 --workers 2
    python benchmarks/goldens.py compare runs/goldens.jsonl --workers 2

A claim is what users rely on: the status, what was looked for, the tokens, and of each text that is certain or one of a
class its tokens, its count and what is open about it. Seconds, distances, sentences and guesses are none of it.

Evidence follows from its seed, and claims from the evidence; on another machine some may differ, as floats do. Every
difference is listed. The exit code is 1 if there is one. A run that was killed goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the contracts' recipes in `tests`

import torch
from campaign.parts import PARTS
from campaign.runner import run_recipe
from progress_bar import progress_bar
from result_lines import Result, append, open_results
from tests.contracts.recipes import RECIPES

import unmask

RUNS = {
    "gradients": 800,
    "decayed": 100,
    "encoders": 200,
    "federations": 200,
    "states": 300,
    "defended": 200,
    "permuted": 100,
    "controls": 50,
    "oracles": 25,
    "lengths": 25,
}
_ATTACKS = ("recover_text", "recover_weights", "recover_inputs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Store claims, or compare them with those that were stored."""
    options = read_options(arguments)
    if options.task == "store":
        known = open_results(options.file, resume=True)
        runs = RUNS if options.runs is None else options.runs
        keys = [*(f"contract {recipe}" for recipe in RECIPES), *_keys(runs, options.seed)]
        for result in _claim_all([key for key in keys if key not in known], options.workers):
            append(options.file, result)
        return 0
    stored = {json.loads(line)["key"]: json.loads(line) for line in options.file.read_text().splitlines()}
    differences = [
        f"{result['key']}: {sentence}"
        for result in _claim_all(list(stored), options.workers)
        for sentence in differ(stored[result["key"]]["claims"], result["claims"])
    ]
    print(*differences, f"{len(differences)} differences in {len(stored)} runs", sep="\n")
    return 1 if differences else 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("store", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", nargs="*", metavar="PART=N", help=f"of each part; without it {RUNS}")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of every part")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.task == "compare" and not options.file.is_file():
        parser.error(f"{options.file} does not exist; make it with `store`")
    if options.runs is not None:
        pairs = [text.split("=") for text in options.runs]
        if any(len(pair) != 2 or pair[0] not in PARTS or not pair[1].isdigit() for pair in pairs):
            parser.error(f"--runs takes part=number, with parts of {', '.join(PARTS)}; got {' '.join(options.runs)}")
        options.runs = {name: int(number) for name, number in pairs}
    return options


def claim_of(recovery: Any) -> dict[str, Any]:
    """What a recovery claims, as JSON keeps it."""
    claim = {"status": recovery.status.name, "looked for": sorted(aim.name for aim in recovery.looked_for)}
    value = recovery.value
    if not isinstance(value, unmask.RecoveredTexts):
        return claim | {"parts": len(value) if hasattr(value, "__len__") else int(value is not None)}
    texts = [
        [list(text.tokens), text.count, text.certain, sorted(_open_points(text))]
        for text in value.texts
        if text.certain or text.ambiguities
    ]
    classes = sorted(map(list, value.token_classes))
    return claim | {"texts": sorted(texts), "tokens": sorted(value.token_set), "classes": classes}


def differ(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    """A sentence for each thing that is claimed otherwise."""
    if len(before) != len(after):
        yield f"{len(before)} recoveries, now {len(after)}"
    for old, new in zip(before, after, strict=False):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield f"{name} {old.get(name)}, now {new.get(name)}"


def _open_points(text: Any) -> Iterator[list[Any]]:
    for point in text.ambiguities:
        yield [point.kind.value, -1 if point.position is None else point.position, list(point.tokens)]


def _keys(runs: dict[str, int], seed: int) -> Iterator[str]:
    for part, number in runs.items():
        yield from (f"{part} {each}" for each in range(seed, seed + number))


def _claim_all(keys: Sequence[str], workers: int) -> Iterator[Result]:
    """The claims of runs, in their order; neighbours share models, so a process takes some at a time."""
    context = multiprocessing.get_context("spawn")
    with progress_bar(len(keys)) as advance, ProcessPoolExecutor(workers, context, _start_worker) as pool:
        for result in pool.map(_claim_one, keys, chunksize=16):
            advance(result["key"].split()[0], 1)
            yield result


def _start_worker() -> None:
    torch.set_num_threads(1)


def _claim_one(key: str) -> Result:
    part, name = key.split(" ", 1)
    if part == "contract":
        recipe = next(recipe for recipe in RECIPES if str(recipe) == name)
        with tempfile.TemporaryDirectory() as folder:
            return {"key": key, "claims": [claim_of(recipe.run(recipe.observe(Path(folder) / "answers")))]}
    with _watched() as recoveries:
        outcome = run_recipe(PARTS[part], PARTS[part].draw(int(name)))
    return {"key": key, "claims": [*map(claim_of, recoveries), {"ended": outcome.status}]}


@contextmanager
def _watched() -> Iterator[list[Any]]:
    """Every recovery that the public functions return meanwhile."""
    recoveries: list[Any] = []

    def watch(attack: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            recoveries.append(attack(*arguments, **options))
            return recoveries[-1]

        return run

    kept = {name: getattr(unmask, name) for name in _ATTACKS}
    try:
        for name, attack in kept.items():
            setattr(unmask, name, watch(attack))
        yield recoveries
    finally:
        for name, attack in kept.items():
            setattr(unmask, name, attack)


if __name__ == "__main__":
    sys.exit(main())
