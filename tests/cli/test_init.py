"""`unmask init`: the plan that it writes is read, checked and run by `unmask audit`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.answers import Answer, Call
from tests.audit.made import save_bert

from unmask import cli
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.audit.plan import load_plan
from unmask.cli.init import MODEL, write_plan
from unmask.errors import InputError
from unmask.models.catalog import CATALOG


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None, tmp_path: Path
) -> Iterator[Call]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["unmask", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return Answer(left.value.code, *capsys.readouterr())

    return run


def test_it_says_what_comes_next(call, tmp_path):
    answer = call("init")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "wrote plan.toml; next:",
        "  unmask audit plan.toml --out runs/audit --dry-run",
        "  unmask audit plan.toml --out runs/audit",
        "  unmask report runs/audit",
    ]
    assert MODEL in CATALOG
    assert {case["model"] for case in load_plan(tmp_path / "plan.toml").cases} == {MODEL}
    assert call("init", "other", "--json").document["plan"] == "other/plan.toml"


def test_a_plan_that_is_there_stays_unless_forced(call, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("mine")
    answer = call("init")
    assert answer.code == 2
    assert "overwrite it with --force" in answer.message
    assert path.read_text() == "mine"
    assert call("init", "--force").code == 0
    assert load_plan(path).cases


def test_the_plan_passes_the_dry_run_and_a_tiny_part_of_it_runs(call, tmp_path):
    model = save_bert(tmp_path / "my model")
    assert call("init", "audit", "--model", model).code == 0
    plan = tmp_path / "audit" / "plan.toml"
    listed = call("audit", plan, "--out", "runs", "--dry-run", "--json")
    assert (listed.code, listed.document["problems"]) == (0, [])
    assert len(listed.document["todo"]) == 4
    start = plan.read_text().partition("# A device runs")[0]
    plan.write_text(start.replace('["none", "noise:sigma=1e-2"]', '["none"]').replace('"invented"]', '"mine"]'))
    with plan.open("a") as file:
        file.write('[data.mine]\ntexts = ["w5 w6 w7"]\n')
    assert call("audit", plan, "--out", "runs", "--threads", 1).code == 1  # the gate is crossed, as it says


def test_what_is_commented_out_is_a_plan_too(tmp_path):
    """Every group of the comments, with their signs taken away."""
    write_plan(tmp_path / "plan.toml", MODEL)
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    lines = (tmp_path / "plan.toml").read_text().splitlines()
    starts = ("# [", "# models", "# layers", "# storages", "# secrets", "# gates", "# file", "# limit")
    opened = "\n".join(line.removeprefix("# ") if line.startswith(starts) else line for line in lines)
    (tmp_path / "whole.toml").write_text(opened)
    assert set(CHANNEL_AUDITS) <= set(tomllib.loads(opened))
    assert {case["channel"] for case in load_plan(tmp_path / "whole.toml").cases} == set(CHANNEL_AUDITS)


@pytest.mark.parametrize("model", ['my "model"', "C:\\models\\clinic", "Ünïcode/模型"])
def test_any_name_of_a_model_is_written_as_it_is(tmp_path, model):
    write_plan(tmp_path / "plan.toml", model)
    assert {case["model"] for case in load_plan(tmp_path / "plan.toml").cases} == {model}


@pytest.mark.parametrize("model", ["", "a\nb", "\x1b[2J"])
def test_a_model_that_has_no_name_is_refused(tmp_path, model):
    with pytest.raises(InputError, match="--model must be"):
        write_plan(tmp_path / "plan.toml", model)


def test_a_folder_with_a_strange_name_does_not_break_the_plan(tmp_path):
    path = tmp_path / "a\ngates = 1" / "plan.toml"
    write_plan(path, MODEL)
    assert load_plan(path).cases
