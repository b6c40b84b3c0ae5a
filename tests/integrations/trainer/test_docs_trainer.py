"""The page on the Trainer: its code runs, and finds what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="the Trainer needs accelerate; run: pip install 'unmask[models]'")
from unmask.audit.findings.folder import read_audit

PAGE = Path(__file__).parents[3] / "docs" / "trainer.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs(smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    exec(compile(code, str(PAGE), "exec"), {})
    (finding,) = read_audit("runs/trainer-audit").findings
    assert (finding.status, finding.metrics["certain_texts"], finding.metrics["exact_texts"]) == ("RECOVERED", 2, 2)
