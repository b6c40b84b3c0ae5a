"""What MkDocs does not do by itself: pages from notebooks, the demo's report, links that leave docs/.

on_config           anchors as GitHub makes them, so that a link works in both places
on_files            notebooks/*.ipynb are executed and become pages; CHANGELOG.md becomes one; a report is made
on_page_markdown    links to files of the repository outside docs/ lead to the repository's page
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anchors import slugify
from demo_report import build_report
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_pages import EXECUTES, render_notebook

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "runs" / "docs"
REPORT = "demo/report.html"
_MARK = "<!-- the demo's report is shown here -->"
_FRAME = f"""<iframe class="report" src="{REPORT}" title="The report of a small audit"></iframe>

<a href="{REPORT}">In a window of its own</a>
"""
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that no Markdown file holds: notebooks with their outputs, the changelog, a report."""
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=render_notebook(path, CACHE)))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=changelog))
    if EXECUTES:
        report = build_report(ROOT / "docs" / "tutorial.md", CACHE)
        files.append(File.generated(config, REPORT, content=report.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Links that leave docs/ lead to the repository, links to notebooks to their pages; the mark becomes a frame."""
    home = ROOT if page.file.src_uri == "changelog.md" else ROOT / "docs" / Path(page.file.src_uri).parent

    def lead_out(match: re.Match[str]) -> str:
        opening, link, rest = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        path = (home / link).resolve()
        if path.suffix == ".ipynb" and path.parent == ROOT / "docs" / "notebooks":
            return f"{opening}{link.removesuffix('.ipynb')}.md{rest}"
        if path.is_relative_to(ROOT / "docs") and home != ROOT:
            return match[0]
        if not path.exists():
            raise PluginError(f"{page.file.src_uri} links to {link}, which the repository does not have")
        if path.is_relative_to(ROOT / "docs"):
            return f"{opening}{path.relative_to(ROOT / 'docs')}{rest}"
        return f"{opening}{config.extra['repository']}/blob/main/{path.relative_to(ROOT)}{rest}"

    return _LINK.sub(lead_out, markdown).replace(_MARK, _FRAME if EXECUTES else "")
