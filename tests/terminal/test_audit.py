"""An audit in a terminal: tables, lines and verdicts, with nothing hostile reaching the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.audit.made import HOSTILE, LOOKED, finding, spec

from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import ERROR, Finding
from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import Verdict, reach_verdict
from unmask.audit.running.runner import Work
from unmask.terminal.audit import AuditTable, OutputConsole, audit_progress, print_verdict, verdict_document

NOTHING = {"exact_texts": 0, "token_recall": 0.0}
FOLDER = Path("runs/audit")


def findings() -> list[Finding]:
    """One of each outcome: a leak, none, not known, an error."""
    nothing = finding("NOTHING_FOUND", NOTHING, **LOOKED)
    made = [finding(), nothing, finding("NOT_APPLICABLE", NOTHING), finding(ERROR, {})]
    return [of_seed(found, seed) for seed, found in enumerate(made)]


def of_seed(found: Finding, seed: int, **changes: Any) -> Finding:
    said = spec(seed=seed, **changes)
    return replace(found, id=Case(said).id, case=said)


def verdict_on(found: list[Finding], gate: str = "no exact text") -> Verdict:
    cases = [{"id": one.id, "gates": [gate], "line": 1, "case": dict(one.case)} for one in found]
    return reach_verdict(Audit({"cases": cases}, tuple(found)))


def rendered(thing: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(thing)
    return out.getvalue()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


# ---- while it runs


def test_the_table_counts_outcomes_by_model():
    cases = [Case(one.case) for one in findings()]
    table = AuditTable(Work(tuple(cases[1:]), tuple(findings()[:1])))
    assert "1 of 4" in rendered(table)
    for found in findings()[1:3]:
        table.add(found)
    shown = rendered(table)
    assert "3 of 4" in shown
    assert "left" in shown
    table.add(findings()[3])
    assert "4 of 4" in rendered(table)
    assert "done" in rendered(table)
    for column in ("leaks", "not leaked by this attack", "inconclusive", "error"):
        assert column in rendered(table)


def test_the_attack_that_runs_is_followed():
    table = AuditTable(Work((Case(spec()),), ()))
    table.report("token filter", 3, 10)
    assert "token filter: 30%" in rendered(table)
    table.report("solving", 0, 0)
    assert "solving" in rendered(table)


@pytest.mark.parametrize("name", [HOSTILE, "[red]m[/red]", "[/]", "x" * 10_000])
def test_a_hostile_model_name_is_shown_as_text(name):
    table = AuditTable(Work((Case(spec(model=name)),), ()))
    table.report(name, 1, 2)
    shown = rendered(table)
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert len(shown) < 20_000
    assert name not in ("[red]m[/red]", "[/]") or name in shown


def test_logs_get_a_line_for_each_finding(capsys):
    hostile = of_seed(finding(), 0, model=HOSTILE)
    with audit_progress(Work((Case(hostile.case),), ())) as table:
        table.add(hostile)
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert err.startswith(hostile.id)
    assert "leaks" in err
    assert err.strip().isprintable()


@pytest.mark.parametrize(("num_others", "said"), [(0, ""), (1, "1 finding of"), (7, "7 findings of another plan")])
def test_findings_of_another_plan_are_said(capsys, num_others, said):
    with audit_progress(Work((), (), num_others)):
        pass
    err = " ".join(capsys.readouterr().err.split())
    assert said in err
    assert bool(err) == bool(num_others)


# ---- the verdict


def test_findings_are_named(capsys):
    found = findings()
    print_verdict(verdict_on(found), FOLDER, found, json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "A gate is crossed: 'no exact text' by 1 case" in out
    assert f"crossed: 'no exact text' (exact_texts = 2) · {found[0].id} · m" in out
    assert f"inconclusive: 'no exact text' (exact_texts = 0) · {found[2].id}" in out
    assert f"error: {found[3].id}" in out
    assert found[1].id not in out
    assert "unmask report runs/audit" in out


def test_the_next_command_can_be_pasted(capsys):
    found = findings()
    print_verdict(verdict_on(found), Path("my runs/audit"), found, json=False)
    assert "Next: unmask report 'my runs/audit'" in " ".join(capsys.readouterr().out.split())


def test_how_much_leaked_is_told_also_where_gates_hold(capsys):
    words = finding("PARTIAL", {"exact_texts": 0, "token_recall": 0.93}, **LOOKED)
    verdict = verdict_on([words])
    assert verdict.exit_code == 0
    print_verdict(verdict, FOLDER, [words], json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "how much leaked" in out
    assert "93 % of tokens, 0 exact held m · fedsgd" in out
    assert verdict_document(verdict, FOLDER, [words])["findings"][0]["leak"] == "93 % of tokens, 0 exact"


def test_an_open_gate_says_why(capsys):
    bag = finding("PARTIAL", {"exact_texts": 0, "token_recall": 0.5}, **{**LOOKED, "looked_for": ("tokens",)})
    verdict = verdict_on([bag])
    print_verdict(verdict, FOLDER, [bag], json=False)
    assert "stopped early, or could not confirm its result" in " ".join(capsys.readouterr().out.split())
    (gate,) = verdict_document(verdict, FOLDER, [bag])["gates"]
    assert gate["why"].startswith("the attack did not look at all texts")


def test_a_reader_that_goes_away_ends_nothing(monkeypatch):
    """Rich would end the program with 1, which says that a gate is crossed."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("os.dup2", lambda *handles: None)
    console = OutputConsole(file=Gone())
    console.print("a")
    assert console.quiet


def test_long_lists_are_cut_and_say_so(capsys):
    found = [of_seed(finding(), seed) for seed in range(30)]
    print_verdict(verdict_on(found), FOLDER, found, json=False)
    out = capsys.readouterr().out
    assert out.count("crossed: ") == 20 + 1  # and the headline
    assert "… and 10 more" in out
    assert "… and 10 more, in the report" in out


def test_hostile_texts_reach_the_terminal_escaped(capsys):
    made = [finding("NOT_APPLICABLE", NOTHING), finding(ERROR, {}), finding()]
    found = [replace(of_seed(one, seed, model=HOSTILE), reason=HOSTILE) for seed, one in enumerate(made)]
    print_verdict(verdict_on(found), Path(f"runs/{HOSTILE}"), found, json=False)
    captured = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in captured.out)
    assert "[bold]x[/bold]" in captured.out  # markup is text
    assert len(captured.out) < 20_000


def test_a_megabyte_of_reason_is_cut(capsys):
    found = [replace(of_seed(finding(ERROR, {}), 0), reason="x" * 2**20)]
    print_verdict(verdict_on(found), FOLDER, found, json=False)
    assert len(capsys.readouterr().out) < 20_000


def test_what_machines_read(capsys):
    found = findings()
    verdict = verdict_on(found)
    print_verdict(verdict, FOLDER, found, json=True)
    out = capsys.readouterr().out
    assert out.isascii()
    document = json.loads(out)
    assert document == verdict_document(verdict, FOLDER, found)
    assert document["exit_code"] == 1
    assert [gate["ruling"] for gate in document["gates"]] == ["crossed", "held", "inconclusive", "inconclusive"]
    assert [row["outcome"] for row in document["findings"]] == ["LEAK", "NO_LEAK", "INCONCLUSIVE", "ERROR"]
    assert document["outcomes"] == {"LEAK": 1, "NO_LEAK": 1, "INCONCLUSIVE": 1, "ERROR": 1}


def test_a_metric_that_is_no_number(capsys):
    """It is null in the file."""
    found = Finding.from_json(of_seed(finding("PARTIAL", {"exact_texts": float("nan")}), 0).to_json())
    for json_wanted in (True, False):
        print_verdict(verdict_on([found]), FOLDER, [found], json_wanted)
    assert "inconclusive: 'no exact text' · " in capsys.readouterr().out
