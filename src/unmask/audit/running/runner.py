"""Run a plan into a folder: skip what is there, keep what comes, lose nothing but the case in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import ERROR, Finding
from unmask.audit.findings.folder import (
    MANIFEST,
    PLAN,
    open_findings,
    read_findings,
    read_manifest,
    write_manifest,
    write_whole,
)
from unmask.audit.findings.result import may_go_on
from unmask.audit.plan import Plan
from unmask.audit.running.engines import Engine, EngineSettings
from unmask.audit.running.manifest import fingerprint_model, make_manifest
from unmask.errors import InputError

Shard = tuple[int, int]


@dataclass(frozen=True)
class Work:
    """What is to be done in a folder, and what is done already."""

    todo: tuple[Case, ...]
    done: tuple[Finding, ...]
    num_others: int = 0  # findings of the folder that are of no case of the plan


def prepare(plan: Plan, folder: Path, *, engine: str, threads: int, command: str) -> dict[str, Any]:
    """Write manifest and plan, as the last of all steps that may refuse.

    A folder whose findings are of other weights under the same name is refused, whether or not its manifest is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MANIFEST
    before = read_manifest(folder) if path.exists() else {}
    found, _ = read_findings(folder)
    manifest = make_manifest(plan, engine=engine, threads=threads, command=command)
    _refuse_another(before, manifest, folder)
    _add_fingerprints(manifest, before, found.values(), folder)
    manifest["models"] = {**before.get("models", {}), **manifest["models"]}  # findings of the others are still here
    write_manifest(folder, manifest)
    write_whole(folder / PLAN, plan.text)
    return manifest


def outline(plan: Plan, folder: Path, shard: Shard | None = None, retry_errors: bool = False) -> Work:
    """Which cases of the plan, or of a shard of it, have no finding yet, or one that a shorter time limit ended."""
    cases = plan.cases if shard is None else plan.shard(*shard)
    found, _ = read_findings(folder)
    again = {id for id, finding in found.items() if retry_errors and finding.status == ERROR}
    todo = tuple(case for case in cases if case.id not in found or case.id in again or may_go_on(found[case.id], case))
    left = {case.id for case in todo}
    num_others = len(found.keys() - {case.id for case in plan.cases})
    return Work(todo, tuple(found[case.id] for case in cases if case.id not in left), num_others)


def run_cases(
    work: Work,
    folder: Path,
    engine: Engine,
    settings: EngineSettings,
    *,
    shard: Shard | None = None,
    tell: Callable[[Finding], None] = lambda finding: None,
) -> None:
    """Run what is to be done; each finding is on the disk before it is told of."""
    with kept_findings(work, folder, engine, settings, shard=shard) as findings:
        for finding in findings:
            tell(finding)


@contextmanager
def kept_findings(
    work: Work, folder: Path, engine: Engine, settings: EngineSettings, *, shard: Shard | None = None
) -> Iterator[Iterator[Finding]]:
    """Findings as they come, each on the disk already; the engine's workers end with the block, however it ends."""
    findings = engine(work.todo, settings)

    def keep() -> Iterator[Finding]:
        for finding in findings:
            file.append(finding)
            yield finding

    try:
        with open_findings(folder, shard) as file:
            yield keep()
    finally:
        close = getattr(findings, "close", None)
        if close is not None:
            close()


def _refuse_another(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Findings of one folder must be of the same weights."""
    for name, model in before.get("models", {}).items():
        files = now["models"].get(name, model)["files"]
        changed = [file for file in model["files"] if files.get(file) != model["files"][file]]
        if changed:
            raise InputError(
                f"{folder} holds findings of '{name}' with another {changed[0]}; the model has changed since, so give "
                "another --out, or bring the old weights back"
            )


def _add_fingerprints(
    manifest: dict[str, Any], before: Mapping[str, Any], findings: Iterable[Finding], folder: Path
) -> None:
    """The fingerprint of each model that has findings, which must have it too.

    A model is loaded for it only where no manifest vouches that its files are still those that were fingerprinted.
    """
    made: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        if finding.model_fingerprint is not None:
            made.setdefault(str(finding.case.get("model")), {})[finding.model_fingerprint] = finding
    for name in manifest["models"].keys() & made.keys():
        model, known = manifest["models"][name], before.get("models", {}).get(name, {})
        is_vouched = bool(model["files"]) and known.get("files") == model["files"] and known.get("fingerprint")
        model["fingerprint"] = known["fingerprint"] if is_vouched else fingerprint_model(name)
        for fingerprint, finding in made[name].items():
            if fingerprint != model["fingerprint"]:
                raise InputError(
                    f"{folder} holds a finding of '{name}' that was made with other weights (case {finding.id}, "
                    f"fingerprint {fingerprint[:12]}; the model now has {model['fingerprint'][:12]}); give another "
                    "--out, or bring the old weights back"
                )
