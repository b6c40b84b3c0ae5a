"""The tutorial: its commands print what it shows, on real weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.S | re.M)


def shown_after(command: str) -> tuple[str, str]:
    """A block of commands, and the block of what they print."""
    place = next(place for place, (_, block) in enumerate(BLOCKS) if block.startswith(command))
    return BLOCKS[place][1], BLOCKS[place + 1][1]


def test_the_first_audit_prints_what_the_page_shows(minilm, tmp_path, commands):
    (tmp_path / "audit").mkdir()
    shutil.copy(ROOT / "examples" / "audit" / "notes.txt", tmp_path / "audit" / "notes.txt")
    (tmp_path / "audit" / "plan.toml").write_text(next(block for kind, block in BLOCKS if kind == "toml"))
    path = f"{commands}:{os.environ['PATH']}"
    environment = {**os.environ, "COLUMNS": "100", "PATH": path}
    for command in (
        "unmask audit audit/plan.toml --out runs/notes --dry-run",
        "unmask audit audit/plan.toml --out runs/notes; echo",
        "unmask report runs/notes",
    ):
        block, shown = shown_after(command)
        done = subprocess.run(block, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        printed = {line.rstrip() for line in done.stdout.splitlines()}
        assert not [line for line in shown.splitlines() if line not in printed], done.stdout + done.stderr
    assert (tmp_path / "runs" / "notes" / "report.html").is_file()
