"""The page on vectors: its code runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import unmask

PAGE = Path(__file__).parents[2] / "docs" / "vectors.md"


def test_the_code_of_the_page_runs(smollm2, capsys, monkeypatch):
    monkeypatch.setattr(unmask, "load_model", {"smollm2-135m": smollm2}.__getitem__)
    text = PAGE.read_text(encoding="utf-8")
    ((code, printed),) = re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```", text, re.S | re.M)
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed
