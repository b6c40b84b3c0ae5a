"""The folder of an audit: what was appended stays, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.audit.made import HOSTILE, finding, spec

from unmask.audit.findings import folder as folder_module
from unmask.audit.findings.finding import ERROR, Finding, FindingError, TextPair
from unmask.audit.findings.folder import (
    MANIFEST,
    FindingsFile,
    lock_folder,
    open_findings,
    read_audit,
    read_findings,
    read_manifest,
    write_whole,
)
from unmask.errors import InputError


def numbered(seed: int, reason: str = "a reason") -> Finding:
    made = finding("PARTIAL", case=spec(seed=seed), texts=(TextPair(((HOSTILE, "place"),), None),))
    return Finding(**{**made.__dict__, "reason": reason})


def write_manifest(folder: Path, seeds: range) -> None:
    cases = [{"id": numbered(seed).id, "gates": [], "line": 1, "case": spec(seed=seed)} for seed in seeds]
    (folder / MANIFEST).write_text(json.dumps({"schema": 1, "cases": cases}))


# ---- writing


def test_every_finding_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    with open_findings(tmp_path) as file:
        for seed in range(3):
            file.append(numbered(seed))
            assert synced[-1] == (tmp_path / "findings.jsonl").stat().st_size
            assert len(read_findings(tmp_path)[0]) == seed + 1
    assert len(synced) == 3


def test_findings_are_for_their_owner_only(tmp_path):
    with open_findings(tmp_path) as file:
        file.append(numbered(0))
    assert (tmp_path / "findings.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_second_run_appends(tmp_path):
    for seed in range(3):
        with open_findings(tmp_path) as file:
            file.append(numbered(seed))
    found, num_damaged = read_findings(tmp_path)
    assert list(found.values()) == [numbered(seed) for seed in range(3)]
    assert num_damaged == 0


def _hold(path: Path, ready: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event) -> None:
    file = FindingsFile(path)
    ready.set()
    done.wait(60)
    file.close()


def test_a_second_writer_is_turned_away(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "findings.jsonl", ready, done))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(InputError, match=r"another process is writing .*findings\.jsonl; wait"):
            FindingsFile(tmp_path / "findings.jsonl")
        with open_findings(tmp_path, (1, 2)) as file:  # a shard has its own
            file.append(numbered(0))
    finally:
        done.set()
        other.join(60)
    with open_findings(tmp_path) as file:
        file.append(numbered(1))
    assert len(read_findings(tmp_path)[0]) == 2


def test_a_file_system_without_locks_can_be_written(tmp_path, monkeypatch):
    """As Lustre often is, where job arrays write."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open_findings(tmp_path, (1, 2)) as file:
        file.append(numbered(0))
    assert len(read_findings(tmp_path)[0]) == 1


# ---- torn lines


@pytest.mark.parametrize("kept", [1, 10, 200, -2, -1])
def test_a_torn_last_line_is_ended_and_skipped(tmp_path, kept):
    """As `kill -9` or the power leaves it; the next finding must not be swallowed."""
    path = tmp_path / "findings.jsonl"
    whole = numbered(0).to_json() + "\n"
    path.write_text(whole + (numbered(1).to_json() + "\n")[:kept])
    before, num_damaged = read_findings(tmp_path)
    is_whole = kept == -1  # only the line's end is missing
    assert (len(before), num_damaged) == ((2, 0) if is_whole else (1, 1))
    with open_findings(tmp_path) as file:
        file.append(numbered(2))
    found, num_damaged = read_findings(tmp_path)
    expected = [0, 1, 2] if is_whole else [0, 2]
    assert list(found.values()) == [numbered(seed) for seed in expected]
    assert num_damaged == (0 if is_whole else 1)
    assert path.read_text().startswith(whole)  # nothing is rewritten


@pytest.mark.parametrize("damage", [b"\x00" * 4096, b"\xff\xfe\xfa", b"[" * 200_000, b'{"id": "ab', b"\xef\xbb\xbf{"])
def test_damage_in_the_middle_is_counted_and_skipped(tmp_path, damage):
    lines = [numbered(0).to_json().encode(), damage, b"", numbered(1).to_json().encode(), b""]
    (tmp_path / "findings.jsonl").write_bytes(b"\n".join(lines))
    found, num_damaged = read_findings(tmp_path)
    assert list(found.values()) == [numbered(0), numbered(1)]
    assert num_damaged == 1


def test_a_finding_of_a_newer_version_is_refused_not_skipped(tmp_path):
    (tmp_path / "findings.jsonl").write_text(numbered(0).to_json().replace('"schema": 2', '"schema": 9'))
    with pytest.raises(FindingError, match="upgrade"):
        read_findings(tmp_path)


def test_an_edited_finding_is_refused_with_its_place(tmp_path):
    lines = [finding(case=spec(seed=seed)).to_json() for seed in (0, 1)]
    lines[1] = lines[1].replace('"exact_texts": 2', '"exact_texts": 0')
    (tmp_path / "findings.jsonl").write_text("\n".join(lines))
    with pytest.raises(FindingError, match=r"findings\.jsonl, line 2: the finding of case '\w+' was changed"):
        read_findings(tmp_path)


@pytest.mark.parametrize("models", [{}, {"m": {"files": {}, "fingerprint": "aa"}}], ids=["mixed", "not the manifest's"])
def test_findings_of_other_weights_are_refused(tmp_path, models):
    """Somebody's findings of the same plan, under a model of the same name."""
    prints = ["aa", "bb"] if not models else ["bb"]
    found = [finding(case=spec(seed=seed), model_fingerprint=one) for seed, one in enumerate(prints)]
    (tmp_path / "findings.jsonl").write_text("".join(one.to_json() + "\n" for one in found))
    cases = [{"id": one.id, "gates": [], "line": 1, "case": dict(one.case)} for one in found]
    (tmp_path / MANIFEST).write_text(json.dumps({"schema": 1, "models": models, "cases": cases}))
    with pytest.raises(FindingError, match=r"other weights than the rest .*run the same audit again"):
        read_audit(tmp_path)


def test_a_federation_has_other_weights_every_round(tmp_path):
    found = [finding(case=spec(seed=seed), model_fingerprint=one) for seed, one in enumerate(["aa", "bb"])]
    (tmp_path / "findings.jsonl").write_text("".join(one.to_json() + "\n" for one in found))
    (tmp_path / MANIFEST).write_text(json.dumps({"schema": 1, "models": {"m": {"fingerprint": "aa"}}}))
    assert len(read_audit(tmp_path).findings) == 2


# ---- full disks


APPEND_UNTIL_FULL = """
import sys
from pathlib import Path
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.folder import FindingsFile, FullDiskError

folder, lines, kept = map(Path, sys.argv[1:])
file = FindingsFile(folder / "findings.jsonl")
for number, line in enumerate(lines.read_text().splitlines()):
    try:
        file.append(Finding.from_json(line))
    except (FullDiskError, OSError) as error:
        print(type(error).__name__, number, error)
        kept.write_bytes(file.path.read_bytes())
        break
"""


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """More findings than the small disks hold."""
    path = tmp_path / "lines"
    path.write_text("\n".join(numbered(seed).to_json() for seed in range(200)))
    return path


def whole_lines(path: Path) -> list[Finding]:
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [Finding.from_json(line) for line in content.decode("ascii").splitlines()]


def test_a_file_that_must_not_grow_keeps_whole_lines(tmp_path, lines):
    """RLIMIT_FSIZE cuts a write in the middle, as a disk that gets full does."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    arguments = [sys.executable, "-c", limit + APPEND_UNTIL_FULL, tmp_path, lines, tmp_path / "kept.jsonl"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kind, seed, *_ = done.stdout.split()
    assert kind == "OSError"
    assert "File too large" in done.stdout
    kept = whole_lines(tmp_path / "kept.jsonl")
    assert kept == [numbered(number) for number in range(int(seed))]
    assert len(kept) > 3


def test_a_full_disk_keeps_whole_lines(tmp_path, lines):
    disk, kept = tmp_path / "disk", tmp_path / "kept.jsonl"
    disk.mkdir()
    (tmp_path / "fill.py").write_text(APPEND_UNTIL_FULL)
    fill = f"exec {shlex.quote(sys.executable)} {tmp_path}/fill.py {disk} {lines} {kept}"
    command = f"mount -t tmpfs -o size=64k none {disk} && echo mounted && {fill}"
    try:
        arguments = ["unshare", "--map-root-user", "--mount", "sh", "-c", command]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("the program unshare is missing; run: apt-get install util-linux")
    if not done.stdout.startswith("mounted"):
        pytest.skip(f"no small disk can be mounted; run as root, or allow user namespaces ({done.stderr.strip()})")
    assert done.returncode == 0, done.stderr
    _, kind, seed, *_ = done.stdout.split()
    assert kind == "FullDiskError"
    assert "the disk is full" in done.stdout
    assert "run the same command again" in done.stdout
    found = whole_lines(kept)
    assert found == [numbered(number) for number in range(int(seed))]
    assert len(found) > 10


def test_a_disk_that_cannot_even_take_back_leaves_a_line_that_readers_skip(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with open_findings(tmp_path) as file:
        file.append(numbered(0))
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", refuse)
            broken.setattr(os, "ftruncate", refuse)
            with pytest.raises(OSError, match="Input/output"):
                file.append(numbered(1))
    with open_findings(tmp_path) as file:
        file.append(numbered(2))
    assert {numbered(0).id, numbered(2).id} <= read_findings(tmp_path)[0].keys()


# ---- reading


def test_an_audit_in_the_order_of_its_plan(tmp_path):
    write_manifest(tmp_path, range(4))
    with open_findings(tmp_path) as file:
        for seed in (2, 0, 1):
            file.append(numbered(seed))
    audit = read_audit(tmp_path)
    assert [found.case["seed"] for found in audit.findings] == [0, 1, 2]
    assert audit.missing == [numbered(3).id]
    assert len(audit.planned) == 4


def test_of_two_findings_of_a_case_the_later_counts(tmp_path):
    write_manifest(tmp_path, range(1))
    with open_findings(tmp_path) as file:
        file.append(numbered(0, "first"))
        file.append(numbered(0, "second"))
    assert [found.reason for found in read_audit(tmp_path).findings] == ["second"]


def test_a_finding_of_a_plan_that_changed_is_left_out(tmp_path):
    write_manifest(tmp_path, range(2))
    with open_findings(tmp_path) as file:
        for seed in range(5):
            file.append(numbered(seed))
    assert len(read_audit(tmp_path).findings) == 2


def test_without_a_plan_every_finding_counts(tmp_path):
    (tmp_path / MANIFEST).write_text('{"schema": 1}')
    with open_findings(tmp_path) as file:
        file.append(numbered(3))
    audit = read_audit(tmp_path)
    assert len(audit.findings) == 1
    assert not audit.planned
    assert not audit.missing


def test_shards_are_read_together(tmp_path):
    write_manifest(tmp_path, range(6))
    for number in (1, 2, 3):
        with open_findings(tmp_path, (number, 3)) as file:
            for seed in range(number - 1, 6, 3):
                file.append(numbered(seed))
    assert sorted(path.name for path in tmp_path.glob("findings*")) == [f"findings-{n}-of-3.jsonl" for n in (1, 2, 3)]
    assert len(read_audit(tmp_path).findings) == 6


def test_a_folder_without_an_audit(tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json.*unmask audit"):
        read_audit(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", "[" * 100_000, "\x00"])
def test_a_damaged_manifest(tmp_path, content):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(InputError, match=r"manifest\.json is damaged.*again"):
        read_manifest(tmp_path)


def test_a_manifest_whose_gates_were_taken_away_is_refused(tmp_path):
    cases = [{"id": "a", "gates": ["no exact text"], "line": 1, "case": {"channel": "gradients"}}]
    folder_module.write_manifest(tmp_path, {"schema": 1, "cases": cases})
    assert read_manifest(tmp_path)["cases"] == cases
    document = json.loads((tmp_path / MANIFEST).read_text())
    document["cases"][0]["gates"] = []
    (tmp_path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(InputError, match="was changed by hand"):
        read_manifest(tmp_path)


def test_a_newer_manifest(tmp_path):
    (tmp_path / MANIFEST).write_text('{"schema": 2}')
    with pytest.raises(InputError, match=r"schema 2.*upgrade"):
        read_audit(tmp_path)


def test_a_small_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.toml"
    write_whole(path, "first")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "second")
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]


def test_a_result_counts_before_an_error_whatever_the_names_of_the_files(tmp_path):
    """Shards are read before the file of a run without shards, and may be younger."""
    failed = replace(numbered(0), status=ERROR, run={"started": "2026-11-15T20:00:00+00:00"})
    for name, kept in (("findings.jsonl", failed), ("findings-1-of-2.jsonl", numbered(0))):
        (tmp_path / name).write_text(kept.to_json() + "\n")
    found, _ = read_findings(tmp_path)
    assert [kept.status for kept in found.values()] == [numbered(0).status]


def test_of_two_results_the_later_counts(tmp_path):
    old, new = (
        replace(numbered(0), reason=day, run={"started": f"2026-11-{day}T20:00:00+00:00"}) for day in ("14", "15")
    )
    (tmp_path / "findings.jsonl").write_text(old.to_json() + "\n")
    (tmp_path / "findings-1-of-2.jsonl").write_text(new.to_json() + "\n")
    assert [kept.reason for kept in read_findings(tmp_path)[0].values()] == ["15"]


def test_a_line_of_somebody_else_is_named(tmp_path):
    (tmp_path / "findings.jsonl").write_text(numbered(0).to_json() + '\n{"a": 1}\n')
    with pytest.raises(FindingError, match=r"findings\.jsonl, line 2"):
        read_findings(tmp_path)


def test_one_audit_a_folder_at_a_time(tmp_path):
    out = tmp_path / "out"
    refused = pytest.raises(InputError, match="another audit is running")
    with lock_folder(out, (1, 2)), lock_folder(out, (2, 2)), refused, lock_folder(out):
        pass
    with lock_folder(tmp_path / "out"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; give a folder"), lock_folder(tmp_path / "file"):
        pass
