"""The page about the architecture and its picture: drawn from the code as it is, naming only files that exist."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from tests.test_house_rules import LAYERS, SECRETS_SIDE

import unmask

ROOT = Path(__file__).parents[1]
PACKAGE = Path(unmask.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs" / "draw_architecture.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_that_of_the_code(drawing):
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.draw(), "run: python docs/draw_architecture.py"


def test_the_picture_reads_the_rules_of_the_house(drawing):
    assert drawing.read_strings("LAYERS") == LAYERS
    assert set(drawing.read_strings("SECRETS_SIDE")) == SECRETS_SIDE


def test_every_file_is_in_a_box(drawing):
    boxes = drawing.read_boxes(LAYERS)
    drawn = {path.relative_to(drawing.PACKAGE) for box in boxes for path in box.files}
    there = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert there - drawn == {Path("__init__.py"), Path("__main__.py")}


def test_an_import_from_below_is_not_drawn(drawing):
    boxes = drawing.read_boxes(LAYERS)
    rows = drawing.place_rows(boxes)
    with pytest.raises(ValueError, match="comes after"):
        list(drawing._draw_imports(rows[0], rows, Counter({("words", "cli"): 1}), frozenset()))


def test_no_text_leaves_its_box_or_meets_another(drawing):
    """Of each box: one text a line, lines apart, and no line longer than fits."""
    for row in drawing.place_rows(drawing.read_boxes(LAYERS)):
        assert all(len(line) <= drawing.TEXT_CHARACTERS for line in row.lines)
        columns = [len(f"{left:<11}{right}") if right else len(left) for left, right in row.rooms]
        assert all(width <= drawing.ROOM_CHARACTERS for width in columns)
    picture = ElementTree.fromstring(drawing.draw())
    places = [(text.get("x"), text.get("y")) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert len(places) == len(set(places)) > 60


def test_the_page_names_only_files_that_exist():
    named = {name for name in re.findall(r"`([\w./-]+)`", PAGE) if "/" in name or name.endswith((".py", ".md"))}
    named |= {f"docs/{name}" for name in re.findall(r"\]\(([\w.-]+)\)", PAGE)}
    named |= set(re.findall(r"^--- (.+)$", PAGE, re.M))
    assert len(named) > 40
    assert not [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()]


def test_the_page_names_every_package():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not [name for name in packages if f"`{name}/`" not in PAGE]
