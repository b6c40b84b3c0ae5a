"""`unmask audit`: run a plan, keep every finding, and let its gates decide."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.cli.options import EXIT_DONE, EXIT_ERROR, JsonOption
from unmask.errors import InputError

if TYPE_CHECKING:
    from unmask.audit.engines import Engine, Means
    from unmask.audit.plan import Plan
    from unmask.audit.runner import Shard


class EngineName(StrEnum):
    """Where cases run."""

    local = "local"
    ray = "ray"


def audit_command(
    plan: Annotated[Path, typer.Argument(help="The plan, a TOML file; docs/plans.md shows how to write one.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for findings and manifest; runs go on in it.")],
    engine: Annotated[EngineName, typer.Option(help="In this process, or on a Ray cluster.")] = EngineName.local,
    shard: Annotated[str | None, typer.Option(help="I/N: every N-th case from the I-th on, for job arrays.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Of each worker; 0: all cores, at most 4.")] = 0,
    case: Annotated[
        list[str] | None, typer.Option(help="Run only this case, by id, and compare with its finding; repeatable.")
    ] = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Run cases again that ended in errors.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the plan and list its cases; run nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Run an audit. It can be stopped at any time and goes on with the same command.

    Exit codes: 0 no gate crossed, 1 a gate crossed, 2 a case ended in an error, 3 inconclusive, which is never 'safe'.

    Example: [bold]unmask audit plan.toml --out runs/audit[/bold]

    On a cluster: [bold]unmask audit plan.toml --out runs/audit --engine ray[/bold]

    In a job array: [bold]unmask audit plan.toml --out runs/audit --shard $SLURM_ARRAY_TASK_ID/8[/bold]
    """
    from unmask.audit.engines import Means
    from unmask.audit.plan import load_plan
    from unmask.show import working

    with working("reading the plan"):
        planned = load_plan(plan)
    part = _shard(shard)
    if dry_run:
        _list_cases(planned, out, part, json)
        raise typer.Exit(EXIT_DONE)
    means = Means(planned.data, device, threads)
    if case:
        raise typer.Exit(_repeat(planned, out, case, means, json))
    raise typer.Exit(_run(planned, out, part, engine, means, retry_errors, json))


def _run(
    plan: Plan, out: Path, shard: Shard | None, engine: EngineName, means: Means, retry_errors: bool, json: bool
) -> int:
    """Run what is missing, print the verdict; its exit code."""
    from unmask.audit.folder import read_audit
    from unmask.audit.runner import outline, prepare, run_cases
    from unmask.audit.verdict import reach_verdict
    from unmask.show import note, working
    from unmask.show.audit import audit_progress, print_verdict

    with working("hashing the models"):
        prepare(plan, out, engine=engine.value, threads=means.threads_each, command=_command())
    work = outline(plan, out, shard, retry_errors)
    if work.done:
        note(f"{len(work.done)} cases have findings already and are skipped")
    with audit_progress(work.todo, work.done) as table:
        watched = replace(means, progress=table.report)
        run_cases(work, out, _engine(engine), watched, shard=shard, tell=table.add)
    audit = read_audit(out)
    verdict = reach_verdict(audit)
    print_verdict(verdict, out, audit.findings, json)
    return verdict.exit_code


def _repeat(plan: Plan, out: Path, starts: list[str], means: Means, json: bool) -> int:
    """Run single cases again and compare; nothing is written, so that findings stay as they were."""
    from unmask.audit.engines import run_local
    from unmask.audit.folder import MANIFEST, read_findings, read_manifest
    from unmask.show import print_json, progress_bar

    wanted = [case for case in plan.cases if any(case.id.startswith(start) for start in starts)]
    if not wanted:
        raise InputError(f"no case of the plan has an id that starts with {' or '.join(starts)}; see --dry-run")
    kept, _ = read_findings(out)
    if not means.threads and (out / MANIFEST).exists():  # the last digits depend on it
        means = replace(means, threads=int(read_manifest(out).get("threads", 0)))
    with progress_bar() as progress:
        found = list(run_local(wanted, replace(means, progress=progress)))
    rows = []
    for finding in found:
        before = kept.get(finding.id)
        same = before is not None and replace(before, run={}).to_json() == replace(finding, run={}).to_json()
        verdict = "no finding to compare with" if before is None else "same finding" if same else "another finding"
        rows.append({"id": finding.id, "outcome": finding.outcome.name, "reason": finding.reason, "repeated": verdict})
    if json:
        print_json(rows)
    else:
        _print_rows(rows)
    return EXIT_ERROR if any(row["repeated"] == "another finding" for row in rows) else EXIT_DONE


def _list_cases(plan: Plan, out: Path, shard: Shard | None, json: bool) -> None:
    """What would run."""
    from unmask.audit.runner import outline
    from unmask.show import print_json

    work = outline(plan, out, shard)
    rows = [{"id": case.id, "case": str(case), "gates": ", ".join(case.gates)} for case in work.todo]
    if json:
        print_json({"todo": rows, "done": len(work.done)})
    else:
        _print_rows(rows)


def _print_rows(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from unmask.show import printable

    table = Table(*(rows[0] if rows else ("nothing to do",)))
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row.values()))
    Console().print(table)


def _engine(name: EngineName) -> Engine:
    if name is EngineName.ray:
        from unmask.audit.ray_engine import run_on_ray

        return run_on_ray
    from unmask.audit.engines import run_local

    return run_local


def _shard(text: str | None) -> Shard | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise InputError(f"--shard must be I/N, as 3/8, got {text!r}")
    return int(match[1]), int(match[2])


def _command() -> str:
    return shlex.join(["unmask", *sys.argv[1:]])
