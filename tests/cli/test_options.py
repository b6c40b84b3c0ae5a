"""Options that commands share: names that the library knows, and a model that is refused before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unmask.cli.options import (
    CacheStorageName,
    DtypeName,
    PartsName,
    PrecisionName,
    Side,
    SiteName,
    StorageName,
    TaskName,
    load,
    read_option,
    text_file,
)
from unmask.errors import InputError
from unmask.evidence import Site, Task
from unmask.protocols.caches import PARTS
from unmask.protocols.caches import STORAGES as CACHE_STORAGES
from unmask.protocols.vectors import STORAGES


def test_names_on_the_command_line_are_those_of_the_library():
    assert {name.value.replace("-", "_") for name in TaskName} == {task.value for task in Task}
    assert {name.value.replace("-", "_") for name in SiteName} == {site.value for site in Site}
    assert all(isinstance(getattr(torch, name.value), torch.dtype) for name in (*DtypeName, *PrecisionName))
    assert {side.value for side in Side} == {"left", "right"}
    assert {name.value for name in CacheStorageName} == set(CACHE_STORAGES)
    assert {name.value for name in StorageName} == set(STORAGES)
    assert {name.value for name in PartsName} == set(PARTS)


def test_an_option_may_name_a_file(tmp_path):
    (tmp_path / "template.txt").write_text("You are")
    assert [read_option(value) for value in (None, "text", f"@{tmp_path / 'template.txt'}")] == [
        None,
        "text",
        "You are",
    ]


def test_a_hyphen_is_standard_input():
    assert text_file(Path("-")) == Path("/dev/stdin")
    assert text_file(Path("notes.txt")) == Path("notes.txt")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(InputError, match="--device must be"):
        load("no-such-model", DtypeName.float32, device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="use --device cpu"):
        load("no-such-model", DtypeName.float32, "cuda:1")
