"""The tour: an audit of all channels on real weights, with defences and controls, that ends in a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from unmask.attacks.recover import recover_text
from unmask.audit.cases.case_names import model_and_case
from unmask.audit.cases.data import INVENTED
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.folder import PLAN, read_audit, write_whole
from unmask.audit.findings.verdict import reach_verdict
from unmask.audit.plan import Plan, load_plan
from unmask.audit.running.engines import EngineSettings, run_local
from unmask.audit.running.runner import Work, kept_findings, outline, prepare
from unmask.channels import CHANNELS
from unmask.demo.story import print_channel, print_first_text, print_results
from unmask.errors import UnknownModelError
from unmask.models.catalog import list_models
from unmask.models.load import load_model
from unmask.protocols.fedsgd import observe_gradients
from unmask.report import write_reports
from unmask.terminal import note, working
from unmask.terminal.audit import OutputConsole, live_table

DEMO_PLAN = Path(__file__).with_name("plan.toml")
_MOST_WORKERS = 2  # each holds a model; more cases at a time would take more memory than laptops have
_FIRST_MODEL = "minilm-l6"  # needs no conversion


def run_demo(out: Path, plan_file: Path = DEMO_PLAN) -> bool:
    """Audit the demo's plan into a folder, and tell it; True if everything held that must hold.

    Must hold: what is not defended leaks in full, and controls give nothing. It can be stopped at any time; called
    again it goes on, and only tells what is done already.
    """
    console = OutputConsole()
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / PLAN, plan_file.read_text(encoding="utf-8"))
    plan = load_plan(out / PLAN)
    _require_models(plan)
    if _FIRST_MODEL in plan.models and not outline(plan, out).done:
        _read_one_text(console, plan)
    note(f"{len(plan.cases)} cases, about three minutes; Ctrl-C loses nothing. The plan is {out / PLAN}")
    settings = EngineSettings(plan.data, workers=min(_MOST_WORKERS, os.cpu_count() or 1))
    with working("reading the weights (SmolLM2 is converted the first time, about half a minute)"):
        command = shlex.join(["unmask", "demo", "--out", str(out)])
        prepare(plan, out, engine="local", threads=settings.threads, command=command)
    _run(console, plan, out, settings)
    return _conclude(console, plan, out)


def _read_one_text(console: Console, plan: Plan) -> None:
    """What was read of what, before anything slow."""
    with working(f"training {_FIRST_MODEL} on one text, and reading its gradients"):
        model = load_model(_FIRST_MODEL)
        (text,), _ = plan.data[INVENTED].draw(1, seed=0)
        update = observe_gradients(model, [text])
        recovery = recover_text(update, model)
    print_first_text(console, _FIRST_MODEL, text, update, recovery)


def _run(console: Console, plan: Plan, out: Path, settings: EngineSettings) -> None:
    """The cases that have no finding yet, and each channel as soon as all of its cases have one."""
    work = outline(plan, out)
    found = {finding.id: finding for finding in work.done}
    settings = replace(settings, progress=lambda *step: table.report(*step))  # of the channel that is waited for
    with kept_findings(work, out, run_local, settings) as findings:
        for channel in CHANNELS:
            ids = [case.id for case in plan.cases if case["channel"] == channel]
            if not ids:
                continue
            print_channel(console, channel, plan)
            if not found.keys() >= set(ids):
                left = tuple(case for case in plan.cases if case.id not in found)
                with live_table(Work(left, tuple(found.values()))) as table:
                    while not found.keys() >= set(ids):
                        finding = next(findings)
                        found[finding.id] = finding
                        table.add(finding)
            print_results(console, [found[id] for id in ids], _controls(plan))


def _conclude(console: Console, plan: Plan, out: Path) -> bool:
    """The verdict, the report, and whether the demo kept what it promises."""
    audit = read_audit(out)
    verdict = reach_verdict(audit)
    style = "red" if verdict.exit_code else "green"
    console.print(Panel(Text(verdict.headline), title="verdict", title_align="left", style=style))
    console.print(Text(f"As a gate in continuous integration it would end with exit code {verdict.exit_code}."))
    with working("writing the report"):
        report = write_reports(out, show_secrets=True)["html"]
    broken = find_broken_claims(audit.findings, _controls(plan))
    for sentence in broken:
        note(f"the demo does not hold: {sentence}")
    console.print(Text(f"{len(audit.findings)} cases took {_seconds(audit.findings):.0f} s of attacks and scores."))
    console.print(Text("The report shows the texts, since they are invented; `unmask report` hides them by default."))
    console.print(Text.assemble(("report: ", "bold"), str(report.resolve())), soft_wrap=True)
    return not broken


def _controls(plan: Plan) -> set[str]:
    """Cases without a gate."""
    return {case.id for case in plan.cases if not case.gates}


def _seconds(findings: tuple[Finding, ...]) -> float:
    return sum(float(finding.run.get("seconds", 0.0)) for finding in findings)


def _require_models(plan: Plan) -> None:
    """Every model that is not installed, with the command that brings it, before anything runs."""
    commands = [entry.install_command for entry in list_models() if entry.name in plan.models and entry.install_command]
    if commands:
        raise UnknownModelError(f"The demo needs weights that are not installed. Run: {' && '.join(commands)}")


def find_broken_claims(findings: Sequence[Finding], controls: Collection[str]) -> list[str]:
    """One sentence for each finding that is not as it must be; `controls` are ids of cases without a signal."""
    broken = []
    for finding in findings:
        name = model_and_case(finding.case)
        if finding.outcome is Outcome.ERROR:
            broken.append(f"{name} ended in an error: {finding.reason}")
        elif finding.id in controls:
            if finding.outcome is Outcome.LEAK:
                broken.append(f"the control {name} leaks, though its evidence holds no signal")
        elif _is_bare(finding) and not _leaks_in_full(finding):
            broken.append(f"{name} should leak in full, but: {finding.reason}")
    return broken


def _is_bare(finding: Finding) -> bool:
    """Whether nothing stands between the secret and the adversary; a mean of states hides what it is a mean of."""
    return not finding.case["defences"] and finding.case.get("site") != "mean"


def _leaks_in_full(finding: Finding) -> bool:
    return finding.metrics.get("exact_rate") == 1.0 or finding.metrics.get("weights_found", 0) > 0
