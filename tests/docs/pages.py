"""The pages that people read: their fenced blocks, links and headings; no Markdown library is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.S | re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block: the page, the word behind its fence, and the text without the fence's indent."""

    page: str
    kind: str
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return tuple(
        Block(name_of(page), kind.strip(), re.sub(rf"^{indent}", "", text, flags=re.M)) for indent, kind, text in found
    )


def code_of(page: str, kind: str = "python") -> list[str]:
    """All blocks of a kind on a page."""
    return [block.text for block in blocks_of(ROOT / page) if block.kind == kind]


@cache
def prose_of(page: Path) -> str:
    """A page, or the text cells of a notebook, without fenced blocks."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return _FENCE.sub("", text)


def links_of(page: Path) -> Iterator[str]:
    """Where a page's links and pictures lead; what stands in code is no link."""
    for link, picture in _LINK.findall(re.sub(r"`[^`\n]*`(?!\])", "", prose_of(page))):
        yield link or picture


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The anchors of a page's headings as GitHub makes them; repeated ones are numbered."""
    seen: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose_of(page), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        number = seen.get(anchor, 0)
        seen[anchor] = number + 1
        anchors.add(f"{anchor}-{number}" if number else anchor)
    return frozenset(anchors)
