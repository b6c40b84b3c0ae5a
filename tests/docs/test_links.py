"""Links and anchors of every page and notebook lead somewhere, and every page is in the site's navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, anchors_of, links_of, name_of, prose_of


def faults_of(page: Path, root: Path = ROOT) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    faults = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        home = page if not path else (page.parent / path).resolve()
        if not home.exists():
            faults.append(f"{page.name}: {link} is no file of the repository")
        elif not home.is_relative_to(root):
            faults.append(f"{page.name}: {link} leaves the repository")
        elif anchor and home.suffix == ".md" and anchor not in anchors_of(home):
            faults.append(f"{page.name}: {link} names no heading")
    return faults


def test_links_lead_somewhere():
    assert sum(len(list(links_of(page))) for page in PAGES) > 100
    assert not [fault for page in (*PAGES, *NOTEBOOKS) for fault in faults_of(page)]


def pages_in(nav: object) -> list[str]:
    match nav:
        case str():
            return [nav]
        case dict():
            return [page for value in nav.values() for page in pages_in(value)]
        case list():
            return [page for value in nav for page in pages_in(value)]
    return []


def test_every_page_is_in_the_navigation_once():
    named = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    ours = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    made = ["changelog.md", *(f"notebooks/{notebook.stem}.md" for notebook in NOTEBOOKS)]
    assert sorted(name for name in named if name.endswith(".md")) == sorted([*ours, *made])


def test_every_public_name_is_in_the_reference():
    import unmask

    pages = [page for page in PAGES if page.parent.name == "api"]
    described = re.findall(r"^::: unmask\.(\w+)$", "\n".join(page.read_text() for page in pages), re.M)
    assert sorted(described) == sorted(set(unmask.__all__) - {"__version__"})


def test_lists_have_a_blank_line_before_them():
    """GitHub does not need it; the site does."""
    item, faults = re.compile(r" {0,3}(?:[-*]|\d+\.) "), []
    for page in PAGES:
        before = ""
        for line in prose_of(page).splitlines():
            if item.match(line) and before.strip() and not item.match(before) and not before.startswith("  "):
                faults.append(f"{name_of(page)}: {line}")
            before = line
    assert not faults


# The rules can be broken


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[x](nowhere.md)", "no file"),
        ("[x](../README.md#nowhere)", "no heading"),
        ("[x](#nowhere)", "no heading"),
        ("![x](nowhere.png)", "no file"),
        ("[`code`](nowhere.py)", "no file"),
    ],
)
def test_a_broken_link_is_seen(text, fault, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Here\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(f"# Title\n\n{text} and [good](../README.md#here), [mine](#title), `[no](link.md)`\n")
    (found,) = faults_of(page, tmp_path)
    assert fault in found
