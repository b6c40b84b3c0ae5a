"""The page on models: its code runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_code_of_the_page_runs(minilm, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert "gradients → texts" in printed
    assert printed.count("encoder (0, ") == 2
    assert printed.count("True") == 4
