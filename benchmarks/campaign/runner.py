"""Seeds in, counts and failures out; in this process or in several, one chunk of seeds after the other."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import unmask
from campaign.outcome import CRASH, FAULTS, TOO_SLOW, Fault, Outcome, Part
from campaign.parts import PARTS
from campaign.shrink import shrink
from unmask.audit.running.time_limit import time_limit

SHRINK_SECONDS = 15.0
PACKAGE = Path(unmask.__file__).parent


class RanTooLong(BaseException):
    """A run's time is over. Not an Exception, so that no attack takes it for one of its own."""


@dataclass(frozen=True)
class Run:
    """One seed of a part, as it ended, with the processor's seconds."""

    seed: int
    outcome: Outcome
    seconds: float


@dataclass
class Tally:
    """The counts of a part, and its failures by signature."""

    part: str
    num_shrunk: int = 2  # failures of one signature that are shrunk; the seeds of the others are listed
    runs: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    recall: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: list[tuple[float, int]] = field(default_factory=list)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, run: Run) -> list[tuple[str, Fault]]:
        """Count a run; the faults of it that are worth shrinking, by signature."""
        outcome = run.outcome
        self.runs += 1
        self.seconds += run.seconds
        self.statuses[outcome.status] += 1
        self.slowest = sorted([*self.slowest, (round(run.seconds, 1), run.seed)], reverse=True)[:3]
        if outcome.refusal:
            self.refusals[f"{outcome.status}: {outcome.refusal[:100]}"] += 1
        if outcome.num_texts:
            counts = self.recall.setdefault(outcome.group, Counter())
            counts.update(texts=outcome.num_texts, certain=outcome.num_certain)
            if outcome.plain:
                counts.update(plain_texts=outcome.num_texts, plain_certain=outcome.num_certain)
        worth = []
        for fault in outcome.faults:
            self.faults[fault.kind] += 1
        for signature, fault in signatures(outcome).items():
            failure = self.failures.setdefault(signature, {"runs": 0, "seeds": [], "smallest": []})
            failure["runs"] += 1
            failure["seeds"] = [*failure["seeds"], run.seed][:20]
            worth += [(signature, fault)] if failure["runs"] <= self.num_shrunk else []
        return worth

    def document(self) -> dict[str, Any]:
        """Everything as JSON keeps it."""
        recall = {}
        for group, counts in sorted(self.recall.items()):
            recall[group] = dict(counts)
            for name in ("", "plain_"):
                if counts[f"{name}texts"]:
                    recall[group][f"{name}recall"] = round(counts[f"{name}certain"] / counts[f"{name}texts"], 3)
        return {
            "runs": self.runs,
            "cpu_seconds": round(self.seconds, 1),
            "statuses": dict(self.statuses.most_common()),
            "faults": {kind: self.faults[kind] for kind in FAULTS},
            "refusals": dict(self.refusals.most_common(20)),
            "recall": recall,
            "slowest": self.slowest,
            "failures": self.failures,
        }


def signatures(outcome: Outcome) -> dict[str, Fault]:
    """The faults of a run, one of each kind and place."""
    return {f"{fault.kind} · {fault.where or outcome.group}": fault for fault in outcome.faults}


def run_recipe(part: Part, recipe: Any) -> Outcome:
    """A recipe, whatever happens: exceptions and endless runs are faults."""
    try:
        with time_limit(part.limit_seconds, RanTooLong):
            return part.run(recipe)
    except RanTooLong:
        return Outcome("too_slow", "", (Fault(TOO_SLOW, f"not done after {part.limit_seconds:.0f} s"),))
    except Exception as error:
        frames = [(Path(frame.filename), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
        inside = [f"{file.relative_to(PACKAGE)}:{name}" for file, name in frames if file.is_relative_to(PACKAGE)]
        place = inside[-1] if inside else "the campaign"
        where = f"{type(error).__name__} in {place}"
        return Outcome("crash", "", (Fault(CRASH, traceback.format_exc(limit=-4), where),))


def run_seed(part: Part, seed: int) -> Run:
    """One seed."""
    started = time.process_time()
    outcome = run_recipe(part, part.draw(seed))
    return Run(seed, outcome, time.process_time() - started)


def shrink_seed(part: Part, seed: int, fault: Fault, seconds: float = SHRINK_SECONDS) -> dict[str, Any]:
    """The smallest recipe that fails as a seed's does, with lines that reproduce it."""

    def fault_of(recipe: Any) -> Fault | None:
        faults = run_recipe(part, recipe).faults
        return next((other for other in faults if (other.kind, other.where) == (fault.kind, fault.where)), None)

    recipe = part.draw(seed)
    if (again := fault_of(recipe)) is None:
        return {"seed": seed, "says": fault.sentence, "python": part.reproduce(recipe), "note": "did not fail again"}
    smallest = shrink(recipe, part.simpler, lambda candidate: fault_of(candidate) is not None, seconds)
    return {"seed": seed, "says": (fault_of(smallest) or again).sentence, "python": part.reproduce(smallest)}


@dataclass
class Campaign:
    """Parts with numbers of runs, in worker processes of one thread each, up to a deadline."""

    runs: dict[str, int]
    seed: int = 0
    workers: int = 1
    threads: int = 1
    minutes: float | None = None
    num_shrunk: int = 2
    tell: Callable[[str], None] = print
    tallies: dict[str, Tally] = field(default_factory=dict)

    def run(self) -> dict[str, Tally]:
        """Everything."""
        started = time.monotonic()
        deadline = started + 60 * self.minutes if self.minutes is not None else float("inf")
        with self._executor() as pool:
            for number, (name, count) in enumerate(self.runs.items()):
                remaining = deadline - time.monotonic()
                share = time.monotonic() + remaining / (len(self.runs) - number)
                self._run_part(pool, PARTS[name], count, share)
        return self.tallies

    def _executor(self) -> Executor:
        """Processes that share nothing; or, without workers, this process."""
        if not self.workers:
            return _Here()
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.workers, context, _start_worker, (self.threads,))

    def _run_part(self, pool: Executor, part: Part, count: int, deadline: float) -> None:
        tally = self.tallies[part.name] = Tally(part.name, self.num_shrunk)
        chunks = self._chunks(part, count)
        started = told = time.monotonic()
        running: dict[Future[Any], str | None] = {}  # the signature, where it is a shrinking
        while True:
            while sum(signature is None for signature in running.values()) < self.workers + 1:
                chunk = next(chunks, None) if time.monotonic() < deadline else None
                if chunk is None:
                    break
                running[pool.submit(_run_chunk, part.name, chunk)] = None
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                signature = running.pop(future)
                if signature is not None:
                    self._keep(tally, signature, future.result())
                    continue
                for run in future.result():
                    for found, fault in tally.add(run):
                        running[pool.submit(_shrink, part.name, run.seed, fault)] = found
            if time.monotonic() - told > 10:
                told = time.monotonic()
                self.tell(progress_line(tally, count, told - started))
        self.tell(progress_line(tally, count, time.monotonic() - started))

    def _keep(self, tally: Tally, signature: str, smallest: dict[str, Any]) -> None:
        tally.failures[signature]["smallest"].append(smallest)
        self.tell(f"\n{tally.part}, seed {smallest['seed']}: {signature}\n{smallest['says']}\n{smallest['python']}\n")

    def _chunks(self, part: Part, count: int) -> Iterator[range]:
        first, last = self.seed, self.seed + count
        return (range(start, min(start + part.chunk, last)) for start in range(first, last, part.chunk))


def progress_line(tally: Tally, count: int, seconds: float) -> str:
    """How far a part is, in one line."""
    found = ", ".join(f"{kind} {number}" for kind, number in tally.faults.items()) or "no fault"
    recovered = tally.statuses["RECOVERED"]
    return f"{tally.part}: {tally.runs} of {count} runs in {seconds:.0f} s, {recovered} RECOVERED; {found}"


class _Here(Executor):
    """Everything at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """The future of a call that has been made."""
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **options))
        return done


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)


def _run_chunk(name: str, seeds: range) -> list[Run]:
    return [run_seed(PARTS[name], seed) for seed in seeds]


def _shrink(name: str, seed: int, fault: Fault) -> dict[str, Any]:
    return shrink_seed(PARTS[name], seed, fault)
