from __future__ import annotations

import json

import pytest
import typer
from tests.report.findings import audit_of, inconclusive, text_case, text_finding, write_audit
from typer.testing import CliRunner

from unmask.cli.report import report_command
from unmask.errors import InputError

app = typer.Typer(rich_markup_mode="rich")
app.command()(report_command)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    return write_audit(tmp_path / "runs", audit_of([text_finding(text_case(), 1.0, 4)], ["no exact text"]))


def test_it_prints_the_headline_and_the_paths(folder):
    result = run(folder)
    assert result.exit_code == 0
    assert "A gate is crossed: 'no exact text' by 1 case; 1 of 1 case leaked." in result.stdout
    for name in ("report.html", "report.md", "junit.xml", "report.sarif"):
        assert str(folder / name) in result.stdout


def test_the_exit_code_is_the_verdict_s_only_if_asked_for(folder, tmp_path):
    assert run(folder, "--gate").exit_code == 1
    unclear = write_audit(tmp_path / "unclear", audit_of([inconclusive(text_case())], ["no exact text"]))
    assert run(unclear, "--gate").exit_code == 3
    assert run(unclear).exit_code == 0


def test_machines_get_one_document(folder, tmp_path):
    result = run(folder, "--json", "--format", "sarif", "--format", "junit", "--out", tmp_path / "out")
    document = json.loads(result.stdout)
    assert document["exit_code"] == 1
    assert document["reports"] == {
        "sarif": str(tmp_path / "out" / "report.sarif"),
        "junit": str(tmp_path / "out" / "junit.xml"),
    }


def test_secrets_only_on_demand_and_with_a_word_about_it(folder):
    assert "biopsy" not in run(folder).stdout + (folder / "report.html").read_text()
    result = run(folder, "--show-secrets")
    assert "contains the texts" in result.stdout
    assert "biopsy" in (folder / "report.html").read_text()


def test_mistakes(folder, tmp_path):
    assert run(folder, "--format", "pdf").exit_code == 2
    assert isinstance(run(tmp_path / "nowhere").exception, InputError)


def test_the_help_has_examples():
    assert run("--help").stdout.count("unmask report runs/release") == 3
