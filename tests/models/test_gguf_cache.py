"""The conversion into the cache, with a cheap converter: races, kills, failures, and folders that lost a file."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unmask.errors import InputError
from unmask.models import gguf_cache
from unmask.models.gguf_cache import GgufSource, cache_folder, convert_once, find_converted

TIMEOUT_SECONDS = 60


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "cache"))
    return cache_folder()


CONVERT_WHEN_TOLD = """
import sys, time
from pathlib import Path
from unmask.models.gguf_cache import GgufSource, convert_once

gguf, started, release = map(Path, sys.argv[1:])

def convert(gguf, folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[:2])
    started.touch()
    while not release.exists():
        time.sleep(0.01)
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())

print(convert_once(GgufSource("tiny", "1.0", gguf), convert))
"""


@pytest.fixture
def tiny(tmp_path: Path) -> GgufSource:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and then weights")
    return GgufSource("tiny", "1.0", file)


def copy(gguf_file: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())


@pytest.fixture
def start_converting(tiny: GgufSource) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that is in the middle of a conversion and goes on when the file `release` appears."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started = tiny.file.with_name(f"started-{len(processes)}")
        command = [
            sys.executable,
            "-c",
            CONVERT_WHEN_TOLD,
            tiny.file,
            started,
            tiny.file.with_name("release"),
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not started.exists():
            assert process.poll() is None, "the process ended before it converted"
            assert time.monotonic() < deadline, "the process did not start converting"
            time.sleep(0.01)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_two_processes_at_once_both_succeed(
    empty_cache: Path, tiny: GgufSource, start_converting: Callable[[], subprocess.Popen[str]]
) -> None:
    processes = [start_converting(), start_converting()]
    assert len(list(empty_cache.iterdir())) == 2
    tiny.file.with_name("release").touch()
    printed = [process.communicate(timeout=TIMEOUT_SECONDS)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == [str(find_converted(tiny))] * 2
    assert [str(folder) for folder in empty_cache.iterdir()] == printed[:1]


def test_a_killed_process_leaves_nothing_that_is_taken(
    empty_cache: Path, tiny: GgufSource, start_converting: Callable[[], subprocess.Popen[str]]
) -> None:
    process = start_converting()
    process.kill()
    process.wait()
    assert len(list(empty_cache.iterdir())) == 1
    assert find_converted(tiny) is None
    folder = convert_once(tiny, copy)
    assert find_converted(tiny) == folder
    assert list(empty_cache.iterdir()) == [folder]


def test_a_failed_conversion_leaves_nothing(empty_cache: Path, tiny: GgufSource) -> None:
    def fail(gguf_file: Path, folder: Path) -> None:
        copy(gguf_file, folder)
        raise OSError("No space left on device")

    with pytest.raises(InputError, match=r"No space left on device.*set UNMASK_CACHE"):
        convert_once(tiny, fail)
    assert list(empty_cache.iterdir()) == []


def test_other_hosts_have_a_day(empty_cache: Path, tiny: GgufSource) -> None:
    fresh, stale = (empty_cache / f".converting-else-where-1-{word}" for word in ("fresh", "stale"))
    for folder in (fresh, stale):
        folder.mkdir(parents=True)
    yesterday = time.time() - gguf_cache.SECONDS_A_DAY - 60
    os.utime(stale, (yesterday, yesterday))
    converted = convert_once(tiny, copy)
    assert sorted(empty_cache.iterdir()) == [fresh, converted]


def test_a_folder_that_lost_a_file_is_made_again(empty_cache: Path, tiny: GgufSource) -> None:
    folder = convert_once(tiny, copy)
    os.truncate(folder / "model.safetensors", 3)
    assert find_converted(tiny) is None
    assert convert_once(tiny, copy) == folder
    assert (folder / "model.safetensors").read_bytes() == tiny.file.read_bytes()


def test_a_new_wheel_or_converter_makes_a_new_folder(
    empty_cache: Path, tiny: GgufSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert_once(tiny, copy)
    newer = dataclasses.replace(tiny, version="1.1")
    assert find_converted(newer) is None
    assert convert_once(newer, copy) != first
    assert find_converted(tiny) == first
    monkeypatch.setattr(gguf_cache, "CONVERTER_VERSION", gguf_cache.CONVERTER_VERSION + 1)
    assert find_converted(tiny) is None


def test_where_the_cache_is(tmp_path: Path, tiny: GgufSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "mine" / "models"
    monkeypatch.delenv("UNMASK_CACHE")
    assert cache_folder() == tmp_path / "shared" / "unmask" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "unmask" / "models"
    monkeypatch.setenv("UNMASK_CACHE", str(tiny.file))  # a file, where a folder is needed
    with pytest.raises(InputError, match="set UNMASK_CACHE"):
        convert_once(tiny, copy)
