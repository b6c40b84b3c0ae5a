"""What the drills are shown with: commands, plans, audits and reports of a changed copy of the package.

Runs in a fresh process whose first argument is a folder to work in.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from functools import cache
from pathlib import Path

from tests.audit.made import WORDS, save_llama, write_plan

import unmask
from unmask.audit.findings.finding import Finding
from unmask.cli import app
from unmask.models import Model

FOLDER = Path(sys.argv[1])


def texts() -> list[str]:
    """What a client holds."""
    return list(WORDS[:2])


@cache
def model_folder() -> Path:
    """A tiny decoder with a tokenizer, on the disk."""
    return save_llama(FOLDER / "llama")


def tiny_model() -> Model:
    """The same, loaded."""
    return unmask.load_model(str(model_folder()))


def group(channel: str, rest: str = "") -> str:
    """A group of a plan."""
    return f'[[{channel}]]\nmodels = ["{model_folder()}"]\ndata = ["notes"]\nbatch_sizes = [2]\n{rest}\n'


def named(command: str) -> list[str]:
    """The names that `unmask attacks` or `unmask defences` lists."""
    return [row["name"] for row in json.loads(_call(command, "--json"))]


def dry_run(*groups: str) -> list[str]:
    """The cases of a plan, in words, after `unmask audit --dry-run` found nothing wrong."""
    plan = write_plan(FOLDER / "plan.toml", *groups)
    document = json.loads(_call("audit", str(plan), "--out", str(FOLDER / "never"), "--dry-run", "--json"))
    assert not document["problems"], document
    return [case["case"] for case in document["todo"]]


def audit(*groups: str) -> tuple[Finding, ...]:
    """The findings of a plan, from its folder."""
    unmask.run_audit(write_plan(FOLDER / "plan.toml", *groups), FOLDER / "run")
    return unmask.read_audit(FOLDER / "run").findings


def report(kind: str) -> str:
    """A report of the last audit."""
    return unmask.write_reports(FOLDER / "run", formats=[kind])[kind].read_text(encoding="utf-8")


def _call(*arguments: str) -> str:
    """What a command prints; it must end well."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = app(list(arguments), standalone_mode=False)
        assert not code, (arguments, code)
    return printed.getvalue()
