"""DAGER's tables and figures (arXiv 2405.15586) again: its published numbers, ours beside them, and its rivals.

python benchmarks/run.py paper dager [--cells 'gpt2/*/ours' 'fig2/*'] [--batches 100] [--device cuda] [--seconds 540]
python benchmarks/run.py paper dager --only-page           the page and its plots from the stored results alone

Cells are model/set/texts/attack and figN/…; --list shows those that were chosen. Cheap and missing ones come first;
--seconds ends the run with the batch that is under way, and --batch-seconds stops a batch. Every batch is a line of
--out as soon as it is done, and what that file holds is not run again. --data is a folder with cola.tsv, sst2.tsv and
rotten_tomatoes.tsv. A machine without the packaged weights gets a copy: --export-models FOLDER here, --models FOLDER
there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import machine
from paper.dager_batches import Workshop, measure, settings_of
from paper.dager_cells import RIVALS, Spec, choose, in_order
from paper.dager_figures import choose_points, measure_point
from paper.dager_models import Place, export_models
from paper.dager_page import write_page
from paper.dager_rivals import measure_rival, rival_settings
from result_lines import Result, append, open_results
from text_sets import SETS, SHARED_DATA, sha256_of

from unmask.audit.running.time_limit import time_limit
from unmask.errors import UnmaskError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "paper-dager.md"
RESULTS = ROOT / "benchmarks" / "results"


STOPPED = "STOPPED"


class BatchStoppedError(Exception):
    """A batch has used up its time."""


@dataclass(frozen=True)
class Job:
    """One line of the results file that is still to be made."""

    name: str
    spec: Any
    run: Callable[[Workshop], Result]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, in order, until the time is up; then write the page if one was asked for."""
    options = parse(arguments)
    if options.export_models:
        return export_models(options.export_models)
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.only_page:
        run_jobs(options)
    if options.page or options.only_page:
        write_page(options.results, options.page or PAGE)
        print(f"wrote {options.page or PAGE}")
    return None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, with mistakes told before anything is run."""
    parser = argparse.ArgumentParser(
        prog="paper.dager", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", default=[], help="names with * and ?; all that the device can do if none")
    parser.add_argument("--batches", type=int, default=100, help="of each cell at most (the paper: 100)")
    parser.add_argument("--seconds", type=float, help="start no batch after this time")
    parser.add_argument("--batch-seconds", type=float, help="stop a batch after this time; it then counts as 0")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", type=Path, default=SHARED_DATA)
    parser.add_argument("--models", type=Path, help="a folder that --export-models wrote")
    parser.add_argument("--export-models", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper_dager.jsonl")
    parser.add_argument("--threads", type=int, help="of torch; one makes times on a shared machine comparable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the cells that would be run, and end")
    parser.add_argument("--page", type=Path, help="write the page there, and its plots beside it")
    parser.add_argument("--only-page", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder whose paper_dager*.jsonl the page shows")
    options = parser.parse_args(arguments)
    missing = [name for name in SETS if not (options.data / f"{name}.tsv").is_file()]
    if missing and not options.only_page and not options.export_models:
        parser.error(f"{options.data} has no {missing[0]}.tsv; give the folder that holds it with --data")
    if options.batches < 1:
        parser.error("--batches must be at least 1")
    page = options.page or PAGE
    if not page.parent.is_dir():
        parser.error(f"{page.parent} is no folder; make it first, or write the page somewhere else")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; leave --device out")
    return options


def run_jobs(options: argparse.Namespace) -> None:
    """One job after the other; a line each on standard output."""
    ends = time.monotonic() + (options.seconds or float("inf"))
    jobs = plan(options)
    if not jobs:
        raise SystemExit(f"no cell that this device can do fits {' '.join(options.cells)}; --list prints all cells")
    if options.list:
        print("\n".join(dict.fromkeys(job.name for job in jobs)))
        return
    held = open_results(options.out, resume=True)
    limit = options.batch_seconds or float("inf")
    done = {key for key, one in held.items() if one.get("status") != STOPPED or one["seconds"] >= limit}
    missing = [job for job in jobs if job.spec.key not in done]
    print(f"{len(jobs)} batches were asked for, {len(missing)} are missing", flush=True)
    workshop = Workshop(Place(options.device, options.models), options.data)
    for number, job in enumerate(missing, start=1):
        if time.monotonic() > ends:
            print(f"the time is up: {len(missing) - number + 1} batches are left for another run", flush=True)
            return
        try:
            with time_limit(options.batch_seconds, BatchStoppedError):
                found = job.run(workshop)
        except BatchStoppedError:
            found = stopped(job, options.batch_seconds, options.device)
        except (UnmaskError, OSError, torch.OutOfMemoryError) as error:  # weights or memory that this machine lacks
            print(f"{number}/{len(missing)} {job.name} is passed over: {str(error).splitlines()[0]}", flush=True)
            continue
        result = {"key": job.spec.key, "spec": asdict(job.spec), **found}
        append(options.out, result)
        print(f"{number}/{len(missing)} {job.name} {told(result)}", flush=True)


def stopped(job: Job, seconds: float, device: str) -> Result:
    """A batch that found nothing in its time; a later run with more time tries it again."""
    counts = dict.fromkeys(("tokens", "width", "rouge1", "rouge2", "exact", "certain", "false_certain"), 0)
    times = {"seconds": seconds, "cpu_seconds": seconds, "status": STOPPED, "reason": f"stopped after {seconds:g} s"}
    return {"num_texts": job.spec.texts, **counts, **times, "device": device, "machine": machine()}


def plan(options: argparse.Namespace) -> list[Job]:
    """Figures' points come last: they take longest and stand beside no published number."""
    digests = {name: sha256_of(options.data / f"{name}.tsv") for name in SETS}
    jobs = []
    for cell, batch in in_order(choose(options.cells, options.device, SETS), options.batches):
        settings = rival_settings(cell, options.device) if cell.attack in RIVALS else settings_of(cell)
        spec = Spec(**asdict(cell), batch=batch, seed=options.seed, data_sha256=digests[cell.data], settings=settings)
        jobs.append(Job(cell.name, spec, lambda workshop, spec=spec: _table_batch(workshop, spec)))
    for point in choose_points(options.cells, options.device, options.batches, options.seed, digests):
        jobs.append(Job(point.name, point, lambda workshop, point=point: measure_point(workshop, point)))
    return jobs


def _table_batch(workshop: Workshop, spec: Spec) -> Result:
    one = measure_rival if spec.attack in RIVALS else measure
    return one(workshop, spec.cell, spec.batch, spec.seed)


def told(result: Result) -> str:
    """A batch in a line."""
    if "rouge1" not in result:
        return f"{result['seconds']:.1f} s"
    return (
        f"ROUGE {100 * result['rouge1']:.0f}/{100 * result['rouge2']:.0f}, {result['exact']} of {result['num_texts']} "
        f"exact, {result['false_certain']} false, {result['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
