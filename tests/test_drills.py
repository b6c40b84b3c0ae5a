"""The drills of docs/architecture.md, done for real: what an addition takes, in files, and that it is then everywhere.

On a copy of the package each drill adds the files of tests/drills/<drill> and the lines that the page shows; what it
touched is counted. Then tests/drills/<drill>/show.py of all drills run in a fresh process on the copy.
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
COUNTS = {"A model family": ("family", 0), "An attack": ("attack", 2), "A defence": ("defence", 2)}
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


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, set[str]]]:
    """A copy of the package with all additions, and the files that each one touched."""
    copy = tmp_path_factory.mktemp("drills") / "src" / "unmask"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy, {title: apply(title, folder, copy) for title, (folder, _) in COUNTS.items()}


@pytest.mark.parametrize("title", COUNTS)
def test_a_drill_takes_as_many_files_as_the_page_says(title, drilled):
    copy, touched = drilled[0], drilled[1][title]
    assert len(touched - COMPUTES) == COUNTS[title][1], touched
    for name in touched:
        module = f"unmask.{name.removesuffix('.py').replace('/', '.')}"
        source = (copy / name).read_text(encoding="utf-8")
        assert not layer_faults(source, module)
        assert not name.startswith("attacks/") or not fence_faults(source, module)


def test_what_was_added_is_everywhere(drilled, tmp_path):
    scripts = [DRILLS / folder / "show.py" for folder, _ in COUNTS.values()]
    shown = run_fresh(drilled[0].parent, tmp_path, *scripts)
    assert shown.returncode == 0, shown.stderr[-3000:]


def run_fresh(source: Path, folder: Path, *scripts: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts in a new process that imports unmask from a copy."""
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    lines = ["import runpy, sys", f"sys.argv[1:] = [{str(folder)!r}]"]
    lines += [f"runpy.run_path({str(script)!r}, run_name='__main__')" for script in scripts]
    command = [sys.executable, "-c", "; ".join(lines)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_without_the_change_nothing_is_there(tmp_path):
    """The same demonstration on the package as it is fails: the drills show what they add."""
    shown = run_fresh(PACKAGE.parent, tmp_path, DRILLS / "defence" / "show.py")
    assert shown.returncode != 0
    assert "assert" in shown.stderr


def test_the_page_says_the_same_numbers():
    titles = dict(re.findall(r"^### (.*?): (.*)$", PAGE, re.M))
    assert titles == {
        "A model family": "0 files",
        "An attack": "2 files",
        "A defence": "2 files",
        "A metric": "1 file, and the number",
        "A channel": "5 files",
    }
    assert set(lines_on_the_page("A metric")) == {"metrics.py", *COMPUTES}
