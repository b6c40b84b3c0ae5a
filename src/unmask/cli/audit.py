"""`unmask audit`: run a plan, keep every finding, and let its gates decide."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.options import EXIT_DONE, EXIT_ERROR, EXIT_INCONCLUSIVE, JsonOption, UsageError
from unmask.errors import InputError

if TYPE_CHECKING:
    from unmask.audit.plan import Plan
    from unmask.audit.running.runner import Shard


class EngineName(StrEnum):
    """Where cases run."""

    local = "local"
    ray = "ray"


def audit_command(
    plan: Annotated[Path, typer.Argument(help="The plan, a TOML file; docs/plans.md shows how to write one.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for findings and manifest; a stopped run continues there.")
    ],
    engine: Annotated[EngineName, typer.Option(help="Run on this machine or on a Ray cluster.")] = EngineName.local,
    shard: Annotated[
        str | None, typer.Option(help="I/N: run every N-th case, starting with case I. For job arrays.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each worker; only large models gain from more than one. Default: 1."),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Processes side by side, each with its own copy of a model. Ray counts its own."),
    ] = 1,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Run only the case with this id, and compare the result with its finding; repeatable."),
    ] = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Run the cases again that ended in an error.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the plan, its models and extras, list the cases, and estimate minutes and memory.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run an audit. You can stop it at any time; the same command continues it.

    Exit codes: 0 no gate crossed, 1 a gate crossed, 2 a case ended in an error, 3 inconclusive, which is never 'safe'.
    With --case: 0 the same finding, 2 a different one or an error, 3 nothing to compare with. With --dry-run: 0, or
    2 if a case cannot run.

    Example: [bold]unmask audit plan.toml --out runs/audit[/bold]

    On all four cores: [bold]unmask audit plan.toml --out runs/audit --workers 4[/bold]

    On a cluster: [bold]unmask audit plan.toml --out runs/audit --engine ray[/bold]

    In a job array: [bold]unmask audit plan.toml --out runs/audit --shard $SLURM_ARRAY_TASK_ID/8[/bold]
    """
    from unmask.audit.plan import load_plan
    from unmask.terminal import working

    part = _shard(shard)
    if case and not dry_run and (part or retry_errors or engine is not EngineName.local):
        raise UsageError("--case runs single cases in this process; leave out --shard, --engine and --retry-errors")
    with working("reading the plan"):
        planned = load_plan(plan)
    if dry_run:
        raise typer.Exit(_list_cases(planned, out, part, engine.value, json))
    if case:
        raise typer.Exit(_repeat(planned, out, case, device, threads, json))
    raise typer.Exit(
        _run(
            planned,
            out,
            json,
            engine=engine.value,
            shard=part,
            device=device,
            threads=threads or 1,
            workers=workers,
            retry_errors=retry_errors,
        )
    )


def _run(plan: Plan, out: Path, json: bool, **options: Any) -> int:
    """Run what is missing, print the verdict; its exit code."""
    from unmask.audit.run import run_audit
    from unmask.terminal import suppress_broken_pipe, working
    from unmask.terminal.audit import audit_progress, print_verdict

    command = shlex.join(["unmask", *sys.argv[1:]])
    verdict = run_audit(plan, out, command=command, watch=audit_progress, busy=working, **options)
    with suppress_broken_pipe():  # whoever reads may stop; the verdict stays
        print_verdict(verdict, out, verdict.findings, json)
    return verdict.exit_code


def _repeat(plan: Plan, out: Path, starts: list[str], device: str, threads: int | None, json: bool) -> int:
    """Run single cases again and compare; nothing is written, so that findings stay as they were."""
    from unmask.audit.findings.folder import MANIFEST, read_findings, read_manifest
    from unmask.audit.running.engines import EngineSettings, run_local
    from unmask.progress import shown_progress
    from unmask.terminal import print_json, suppress_broken_pipe

    wanted = [case for case in plan.cases if any(case.id.startswith(start) for start in starts)]
    if not wanted:
        raise InputError(f"no case of the plan has an id that starts with {' or '.join(starts)}; see --dry-run")
    kept, _ = read_findings(out)
    before_this = read_manifest(out) if (out / MANIFEST).exists() else {}
    with shown_progress() as progress:  # the last digits depend on the threads, so they are those of the findings
        settings = EngineSettings(plan.data, device, threads or int(before_this.get("threads", 1)), progress)
        found = list(run_local(wanted, settings))
    rows = []
    for finding in found:
        before = kept.get(finding.id)
        same = before is not None and replace(before, run={}).to_json() == replace(finding, run={}).to_json()
        verdict = "no finding to compare with" if before is None else "same finding" if same else "another finding"
        rows.append({"id": finding.id, "outcome": finding.outcome.name, "reason": finding.reason, "repeated": verdict})
    with suppress_broken_pipe():
        if json:
            print_json(rows)
        else:
            _print_rows(rows)
    if any(row["repeated"] == "another finding" or row["outcome"] == "ERROR" for row in rows):
        return EXIT_ERROR
    return EXIT_DONE if all(row["repeated"] == "same finding" for row in rows) else EXIT_INCONCLUSIVE


def _list_cases(plan: Plan, out: Path, shard: Shard | None, engine: str, json: bool) -> int:
    """What would run, and what cannot."""
    from unmask.audit.check import find_problems
    from unmask.audit.running.estimate import estimate_all
    from unmask.audit.running.runner import outline
    from unmask.progress import describe_seconds
    from unmask.terminal import note, print_json, suppress_broken_pipe, working

    work = outline(plan, out, shard)
    with working("looking at the models"):
        problems = find_problems(work.todo, engine)
    estimates = estimate_all(work.todo)
    rows = [
        {"id": case.id, "case": str(case), "gates": ", ".join(case.gates), "rough estimate": str(guess or "not known")}
        for case, guess in zip(work.todo, estimates, strict=True)
    ]
    with suppress_broken_pipe():
        if json:
            found = [{"problem": sentence, "cases": ids} for sentence, ids in problems.items()]
            print_json({"todo": rows, "done": len(work.done), "problems": found})
        else:
            _print_rows(rows)
    if rows and not json:
        minutes = sum(guess.minutes for guess in estimates if guess)
        largest = max((guess.gigabytes for guess in estimates if guess), default=0.0)
        note(
            f"all together about {describe_seconds(60 * minutes)} on one core of this kind and up to {largest:.1f} GB: "
            "a rough estimate, within a factor of five or so"
        )
    for sentence, ids in problems.items():
        note(f"{len(ids)} of {len(rows)} cases cannot run: {sentence}")
    return EXIT_ERROR if problems else EXIT_DONE


def _print_rows(rows: list[dict[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from unmask.terminal import printable
    from unmask.terminal.audit import OutputConsole

    table = Table(*(rows[0] if rows else ("nothing to do",)))
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row.values()))
    OutputConsole().print(table)


def _shard(text: str | None) -> Shard | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise UsageError(f"--shard must be I/N, for example 3/8, got {text!r}")
    return int(match[1]), int(match[2])
