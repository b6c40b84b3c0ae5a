"""The folder of an audit: a manifest and findings. Findings are appended, synced, and never rewritten.

manifest.json       what was planned and on what: versions, hardware, hashes, every case with its gates
plan.toml           a copy of the plan
findings*.jsonl     one finding a line; a shard of a job array has a file of its own
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from unmask.audit.cases.case_names import full_name
from unmask.audit.findings.finding import ERROR, DamagedLineError, Finding, FindingError, digest_of
from unmask.displays import Displayed, Row
from unmask.errors import InputError, UnmaskError
from unmask.safe_text import quote_word
from unmask.whole_files import written_whole

MANIFEST, PLAN = "manifest.json", "plan.toml"
SCHEMA = 1  # of the manifest
_PATTERN = "findings*.jsonl"


class FullDiskError(UnmaskError):
    """Nothing more can be written. What was written before is whole."""


@dataclass(frozen=True, repr=False)
class Audit(Displayed):
    """What a folder holds: the manifest, and one finding for each case, in the order of the manifest."""

    manifest: Mapping[str, Any]
    findings: tuple[Finding, ...]
    num_damaged: int = 0  # lines that could not be read: a case that was in flight when the power went

    def display_rows(self) -> tuple[Row, Sequence[Row]]:
        """How many findings, and a row for each with its case."""
        rows = [(finding.outcome.value, full_name(finding.case)) for finding in self.findings]
        return ("Audit", f"{len(rows)} findings, {len(self.missing)} cases not run"), rows

    @property
    def planned(self) -> list[Mapping[str, Any]]:
        """Every case of the plan as {'id', 'gates', 'line', 'case'}; empty where nothing was planned (Flower)."""
        return list(self.manifest.get("cases", ()))

    @property
    def missing(self) -> list[str]:
        """Ids of planned cases without a finding."""
        done = {finding.id for finding in self.findings}
        return [case["id"] for case in self.planned if case["id"] not in done]


def read_audit(folder: str | Path) -> Audit:
    """Read a folder back: findings of the plan as it is now, of two of one case the later; torn lines are counted."""
    return audit_of(read_manifest(Path(folder)), Path(folder))


def audit_of(manifest: Mapping[str, Any], folder: Path) -> Audit:
    """The audit that a manifest describes, with the findings of a folder."""
    findings, num_damaged = read_findings(folder)
    if "cases" in manifest:
        planned = [case["id"] for case in manifest["cases"]]
        findings = {id: findings[id] for id in planned if id in findings}
        _refuse_mixed_weights(manifest, findings.values(), folder)
    return Audit(manifest, tuple(findings.values()), num_damaged)


def _refuse_mixed_weights(manifest: Mapping[str, Any], findings: Iterable[Finding], folder: Path) -> None:
    """Findings of one model of a plan must be of the same weights, and of those that the manifest names."""
    models = manifest.get("models", {})
    known = {name: model["fingerprint"] for name, model in models.items() if model.get("fingerprint")}
    for finding in findings:
        name, fingerprint = str(finding.case.get("model")), finding.model_fingerprint
        if fingerprint is not None and known.setdefault(name, fingerprint) != fingerprint:
            raise FindingError(
                f"{folder} holds a finding of '{name}' that was made with other weights than the rest (case "
                f"{finding.id}); take the line out and run the same audit again"
            )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; a damaged or newer one is refused with the reason."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        schema = manifest["schema"]
        _check_cases(manifest.get("cases", []))
    except FileNotFoundError:
        raise InputError(
            f"{folder} holds no audit: there is no {MANIFEST}; make one with "
            f"`unmask audit plan.toml --out {quote_word(folder)}`"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{folder / MANIFEST} is damaged ({error!r}); delete it and run the audit again with the same plan: "
            "findings stay"
        ) from None
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise InputError(
            f"{folder / MANIFEST} has schema {schema!r}, this version reads up to {SCHEMA}; upgrade unmask"
        )
    if manifest.get("digest", digest_of(manifest)) != digest_of(manifest):
        raise InputError(
            f"{folder / MANIFEST} was changed by hand: its digest does not fit what it says, gates included; delete "
            "it and run the audit again with the same plan: findings stay"
        )
    return dict(manifest)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest with a digest of what it says."""
    document = {**manifest, "digest": digest_of(manifest)}
    write_whole(folder / MANIFEST, json.dumps(document, indent=1, ensure_ascii=True) + "\n")


def _check_cases(cases: Any) -> None:
    for case in cases:
        fits = isinstance(case["case"], dict) and isinstance(case["gates"], list) and isinstance(case["line"], int)
        if not fits or not isinstance(case["id"], str):
            raise TypeError(f"a case is {case!r}"[:200])


def read_findings(folder: Path) -> tuple[dict[str, Finding], int]:
    """Findings by id, and the number of lines that a crash tore. Edited, older and newer findings are refused."""
    found: dict[str, Finding] = {}
    num_damaged = 0
    for path in sorted(folder.glob(_PATTERN)):
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                finding = Finding.from_json(line)
            except DamagedLineError:
                num_damaged += 1
                continue
            except FindingError as error:
                raise FindingError(f"{path}, line {number}: {error}") from None
            before = found.get(finding.id)
            if before is None or _supersedes(finding, before):
                found[finding.id] = finding
    return found, num_damaged


def _supersedes(finding: Finding, before: Finding) -> bool:
    """Whether of two findings of one case this one counts: a result before an error, then the later one."""
    if (finding.status == ERROR) != (before.status == ERROR):
        return before.status == ERROR
    return str(finding.run.get("started", "")) >= str(before.run.get("started", ""))


class FindingsFile:
    """The file that one process appends to; a second process at the same file is turned away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        os.chmod(path, 0o600)  # findings hold the secret
        try:
            _lock(self._file, fcntl.LOCK_EX, f"another process is writing {path}")
        except InputError:
            self._file.close()
            raise
        self._end_torn_line()

    def append(self, finding: Finding) -> None:
        """One line, on the disk before this returns; a line that does not fit is taken back."""
        line = finding.to_json().encode("ascii") + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            self._take_back(start)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FullDiskError(
                    f"the disk is full, so the finding of case {finding.id} could not be kept; all earlier ones are in "
                    f"{self.path}. Free some space and run the same command again: it continues from there"
                ) from None
            raise

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _take_back(self, start: int) -> None:
        with suppress(OSError):  # a torn line is ended when the file is opened again, and skipped by readers
            os.ftruncate(self._file.fileno(), start)

    def _end_torn_line(self) -> None:
        """A line that a crash cut off must not swallow the next one."""
        size = self._file.seek(0, os.SEEK_END)
        if size:
            with open(self.path, "rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    self._file.write(b"\n")


@contextmanager
def lock_folder(folder: Path, shard: tuple[int, int] | None = None) -> Iterator[None]:
    """One audit a folder at a time; shards may be several, as each has a file of its own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"--out {folder} is a file; give a folder") from None
    with open(folder / ".lock", "a") as file:
        kind = fcntl.LOCK_EX if shard is None else fcntl.LOCK_SH
        _lock(file, kind, f"another audit is running in {folder}")
        yield


def _lock(file: IO[Any], kind: int, taken: str) -> None:
    """Lock a file until it is closed; where others have it, say so."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{taken}; wait for it, or use another --out") from None
    except OSError:
        pass  # a file system without locks, as clusters have some; shards have files of their own


@contextmanager
def open_findings(folder: Path, shard: tuple[int, int] | None = None) -> Iterator[FindingsFile]:
    """The file of this process: `findings.jsonl`, or that of a shard."""
    name = "findings.jsonl" if shard is None else f"findings-{shard[0]}-of-{shard[1]}.jsonl"
    file = FindingsFile(folder / name)
    try:
        yield file
    finally:
        file.close()


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
