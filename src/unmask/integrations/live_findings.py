"""The folder of an audit that runs inside somebody else's program: a manifest, findings as they come, lines in the log.

There is no plan: cases are what happens, and so there are no gates. `unmask report` reads the folder as any other.
Only `open` raises, for mistakes in the options; a finding that cannot be kept is a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import MANIFEST, FindingsFile, read_findings, read_manifest, write_manifest
from unmask.audit.running.manifest import describe_machine, hash_model
from unmask.errors import InputError


@dataclass(frozen=True)
class Program:
    """Whose program it is: the name in manifests and cases, the command that starts it, the logger that it shows."""

    name: str
    command: str
    log: logging.Logger


class LiveFindings:
    """Findings of one folder, by one program."""

    def __init__(self, folder: str | Path, program: Program) -> None:
        self.folder = Path(folder)
        self.program = program
        self._taken: set[str] = set()

    def open(self, source: Any, fingerprint: str | None = None) -> None:
        """Make the folder and its manifest; a folder of another program's audit is refused.

        `fingerprint` is that of the weights at the start, where somebody knows it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / MANIFEST).exists():
            self._write_manifest(source, fingerprint)
        engine = read_manifest(self.folder).get("engine")
        if engine != self.program.name:
            raise InputError(f"{self.folder} holds an audit of the engine {engine!r}; choose another folder as `out`")
        self._taken = set(read_findings(self.folder)[0])

    def new_case(self, spec: Mapping[str, Any]) -> Case:
        """The case of a specification; one that came before, in an earlier run too, is a further exchange."""
        case, exchange = Case(spec), 1
        while case.id in self._taken:
            exchange += 1
            case = Case({**spec, "exchange": exchange})
        return case

    def keep(self, finding: Finding, where: str, file: str = "findings.jsonl") -> None:
        """Append a finding, and say it in the log."""
        log = self.program.log
        try:
            held = FindingsFile(self.folder / file)
            try:
                held.append(finding)
            finally:
                held.close()
            self._taken.add(finding.id)
        except Exception as error:
            log.warning("%s: the finding could not be kept: %s", where, error)
        level = logging.WARNING if finding.outcome in (Outcome.LEAK, Outcome.ERROR) else logging.INFO
        log.log(level, "%s: %s (%s). %s", where, finding.outcome.value, finding.status, finding.reason)

    def _write_manifest(self, source: Any, fingerprint: str | None) -> None:
        files = hash_model(str(source)) if isinstance(source, (str, Path)) else {}
        manifest = {
            **describe_machine(),
            "engine": self.program.name,
            "threads": torch.get_num_threads(),
            "command": self.program.command,
            "models": {name_model(source): {"files": files, "fingerprint": fingerprint}},
            "data": {},
        }
        write_manifest(self.folder, manifest)


def name_model(source: Any) -> str:
    """A model's name in findings."""
    if isinstance(source, (str, Path)):
        return str(source)
    hf = getattr(source, "hf", source)
    return str(getattr(getattr(hf, "config", None), "name_or_path", "") or type(hf).__name__)
