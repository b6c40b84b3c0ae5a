from __future__ import annotations

import shlex
import subprocess

import pytest
from tests.report.findings import HOSTILE, text_case

from unmask.audit.cases.case_names import full_name, model_name
from unmask.report.case_details import is_shortened, repeat_command, specification


def test_the_specification_has_every_entry():
    case = text_case()
    pairs = dict(specification(case, show=True))
    assert set(pairs) == set(case)
    assert pairs["data"] == f"notes (sha256 {'ab' * 32})"
    assert pairs["defences"] == "none"


def test_without_secrets_there_is_no_hash_of_the_data_and_no_folder():
    case = text_case(model="/home/ann lee/models/mine", data={"name": "notes", "sha256": "ab" * 32})
    pairs = dict(specification(case, show=False))
    assert (pairs["data"], pairs["model"]) == ("notes", "…/mine")
    assert dict(specification(case, show=True))["model"] == "/home/ann lee/models/mine"
    assert model_name(case) == "…/mine"
    assert "ann" not in full_name(case)


def test_the_command_is_quoted_for_a_shell():
    command = repeat_command("my plan'; rm -rf.toml", "runs/$(x)", "ab12", show=False)
    assert shlex.split(command) == [
        *("unmask", "audit", "my plan'; rm -rf.toml", "--out", "runs/$(x)", "--case", "ab12")
    ]
    assert repeat_command(None, "runs", "ab12", show=True) is None


@pytest.mark.parametrize("path", ["x" * 500, "\u202etxt.lm't\\", "a\nb\x1b", "-plan.toml", "é plan", "\U000e0001"])
def test_a_shell_reads_the_very_path(path):
    command = repeat_command(path, path, "ab12", show=True)
    assert command.isprintable()
    words = command.replace("unmask", r"printf '%s\0'", 1)
    seen = subprocess.run(["bash", "-c", words], check=True, capture_output=True, env={"LC_ALL": "C.UTF-8"}).stdout
    plan, folder = (seen.decode().split("\0")[place].removeprefix("./") for place in (1, 3))
    assert plan == folder == path
    assert not seen.decode().split("\0")[1].startswith("-")


def test_a_redacted_command_has_no_folder():
    assert repeat_command("/home/ann/plan.toml", "/srv/runs/x/", "ab12", show=False) == (
        "unmask audit plan.toml --out x --case ab12"
    )
    assert is_shortened("/home/ann/plan.toml", "x")
    assert not is_shortened("plan.toml", "runs/x")


def test_hostile_names_are_harmless():
    for text in HOSTILE:
        case = text_case(model=text, protocol=text, defences=[text], data={"name": text, "sha256": text})
        assert full_name(case).isprintable()
        assert all(
            value.isprintable() for show in (True, False) for pair in specification(case, show) for value in pair
        )
