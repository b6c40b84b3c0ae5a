from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from tests.report.findings import audit_of, realistic, text_case, text_finding, write_audit

from unmask.errors import InputError
from unmask.report import write_reports


@pytest.fixture
def folder(tmp_path):
    return write_audit(tmp_path / "runs", audit_of([text_finding(text_case(), 1.0, 4)], ["no exact text"]))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_four_files_beside_the_findings(folder):
    paths = write_reports(folder)
    assert {name: path.name for name, path in paths.items()} == {
        "html": "report.html",
        "markdown": "report.md",
        "junit": "junit.xml",
        "sarif": "report.sarif",
    }
    assert all(path.parent == folder and path.stat().st_size for path in paths.values())
    assert {mode(path) for path in paths.values()} == {0o644}


def test_what_the_umask_keeps_from_others_stays_kept(folder):
    before = os.umask(0o077)
    try:
        assert {mode(path) for path in write_reports(folder).values()} == {0o600}
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)


def test_only_html_ever_holds_the_texts_and_then_only_its_owner_reads_it(folder):
    paths = write_reports(folder, show_secrets=True)
    assert mode(paths["html"]) == 0o600
    assert [name for name, path in paths.items() if "biopsy" in path.read_text()] == ["html"]
    write_reports(folder)
    assert "biopsy" not in paths["html"].read_text()


def test_the_same_findings_give_the_same_reports(tmp_path):
    folder = write_audit(tmp_path / "runs", audit_of(realistic(), ["no exact text"]))
    first = {name: path.read_bytes() for name, path in write_reports(folder).items()}
    assert {name: path.read_bytes() for name, path in write_reports(folder).items()} == first


def test_formats_and_folder_can_be_chosen(folder, tmp_path):
    paths = write_reports(folder, formats=["junit"], out=tmp_path / "new" / "place")
    assert list(paths.values()) == [tmp_path / "new" / "place" / "junit.xml"]


@pytest.mark.parametrize("formats", [["pdf"], []])
def test_a_format_that_there_is_not(folder, formats):
    with pytest.raises(InputError, match="html, markdown, junit, sarif"):
        write_reports(folder, formats=formats)


def test_a_folder_without_an_audit(tmp_path):
    with pytest.raises(InputError, match="no audit"):
        write_reports(tmp_path)
    (tmp_path / "my runs").mkdir()
    with pytest.raises(InputError, match=r"`unmask audit plan\.toml --out '.*/my runs'`"):
        write_reports(tmp_path / "my runs")


def test_no_model_is_needed(folder):
    code = f"import sys; from unmask.report import write_reports; write_reports({str(folder)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "jinja2" in done.stdout.split()
    assert "torch" not in done.stdout.split()
