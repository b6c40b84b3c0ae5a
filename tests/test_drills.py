"""The drills of docs/architecture.md, done for real: what an addition takes, in files, and that it is then everywhere.

Each drill copies the package, adds the files of tests/drills/<drill> and the lines that the page shows, counts what it
touched, and runs tests/drills/<drill>/show.py in a fresh process on the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_house_rules import fence_faults, layer_faults

import unmask

ROOT = Path(__file__).parents[1]
PACKAGE = Path(unmask.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRILLS = ROOT / "tests" / "drills"
COUNTS = {"A model family": ("family", 1), "An attack": ("attack", 2), "A defence": ("defence", 2)}
COUNTS |= {"A metric": ("metric", 1), "A channel": ("channel", 5)}
COMPUTES = {"audit/channels/text_scores.py"}  # a metric's number; the metric itself is one entry


def lines_on_the_page(title: str) -> dict[str, list[tuple[str, str]]]:
    """Of each file that a drill changes, pairs of a line that is there and the lines that come after it."""
    section = PAGE.split(f"### {title}:")[1].split("\n#")[0]
    changes: dict[str, list[tuple[str, str]]] = {}
    for block in re.findall(r"^```diff\n(.*?)^```", section, re.S | re.M):
        name = ""
        for line in block.splitlines():
            if line.startswith("--- "):
                name = line.removeprefix("--- ")
            elif line.startswith(" "):
                changes.setdefault(name, []).append((line[1:] + "\n", ""))
            else:
                anchor, added = changes[name][-1]
                changes[name][-1] = anchor, f"{added}{line.removeprefix('+')}\n"
    return changes


def apply(title: str, folder: str, copy: Path) -> set[str]:
    """Change a copy of the package as the page says; the files that were added or changed."""
    home = DRILLS / folder
    added = [path for path in home.rglob("*.py") if path.name != "show.py"]
    for path in added:
        place = copy / path.relative_to(home)
        assert not place.exists()
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    changed = lines_on_the_page(title)
    for name, pairs in changed.items():
        text = (copy / name).read_text(encoding="utf-8")
        for anchor, more in pairs:
            assert text.count(anchor) == 1, (name, anchor)
            text = text.replace(anchor, anchor + more)
        (copy / name).write_text(text, encoding="utf-8")
    return {str(path.relative_to(home)) for path in added} | set(changed)


@pytest.mark.parametrize("title", COUNTS)
def test_a_drill_takes_as_many_files_as_the_page_says(title, tmp_path):
    folder, count = COUNTS[title]
    copy = tmp_path / "src" / "unmask"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    touched = apply(title, folder, copy)
    assert len(touched - COMPUTES) == count, touched
    for name in touched:
        module = f"unmask.{name.removesuffix('.py').replace('/', '.')}"
        source = (copy / name).read_text(encoding="utf-8")
        assert not layer_faults(source, module)
        assert not name.startswith("attacks/") or not fence_faults(source, module)
    work = tmp_path / "work"
    work.mkdir()
    shown = run_fresh(copy.parent, DRILLS / folder / "show.py", work)
    assert shown.returncode == 0, shown.stderr[-3000:]


def run_fresh(source: Path, script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process that imports unmask from a copy."""
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


def test_without_the_change_nothing_is_there(tmp_path):
    """The same demonstration on the package as it is fails: the drills show what they add."""
    shown = run_fresh(PACKAGE.parent, DRILLS / "defence" / "show.py", tmp_path)
    assert shown.returncode != 0
    assert "assert" in shown.stderr


def test_the_page_says_the_same_numbers():
    titles = dict(re.findall(r"^### (.*?): (.*)$", PAGE, re.M))
    assert titles == {
        "A model family": "0 or 1 file",
        "An attack": "2 files",
        "A defence": "2 files",
        "A metric": "1 file, and the number",
        "A channel": "5 files",
    }
    assert set(lines_on_the_page("A metric")) == {"metrics.py", *COMPUTES}
