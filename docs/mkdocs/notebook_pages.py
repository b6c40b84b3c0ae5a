"""A notebook becomes a page: it is executed, and its outputs stand below its cells.

Notebooks are stored without outputs. What an execution printed is kept in a folder, under the hash of the cells and of
the package's sources, so that a page is executed again only when one of them has changed.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import nbclient
import nbformat

SOURCES = Path(__file__).parents[2] / "src" / "unmask"
LIMIT_S = 600
# For those who write pages: UNMASK_DOCS_EXECUTE=0 builds the site in seconds, without outputs and without the report.
EXECUTES = os.environ.get("UNMASK_DOCS_EXECUTE", "1") != "0"


def render_notebook(path: Path, cache: Path) -> str:
    """The page of a notebook, as Markdown, from the cache if nothing has changed."""
    if not EXECUTES:
        return write_page(nbformat.read(path, as_version=4), path.name)
    kept = cache / f"{path.stem}-{hash_files(path, *sorted(SOURCES.rglob('*.py')))}.md"
    if not kept.is_file():
        page = write_page(execute(path), path.name)
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob(f"{path.stem}-*.md"):
            old.unlink()
        kept.write_text(page, encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def hash_files(*paths: Path) -> str:
    """One short hash for the content of all these files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run from the first cell to the last, offline and on one thread."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources).execute()
    return notebook


def write_page(notebook: nbformat.NotebookNode, name: str) -> str:
    """Cells as Markdown: text as it is, code as Python, what it printed as text. The file can be downloaded."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            if len(parts) == 1:
                link = f'<a href="{name}" download>Download this notebook</a>.'
                parts.append(f"{link} What it prints here was printed when this page was built.")
        else:
            parts.append(f"```python\n{cell.source}\n```")
            if printed := "".join(map(text_of, cell.outputs)).rstrip():
                parts.append(f'```text title="prints"\n{printed}\n```')
    return "\n\n".join(parts) + "\n"


def text_of(output: nbformat.NotebookNode) -> str:
    """What an output says; warnings and progress bars are left out."""
    if output.output_type == "stream":
        return output.text if output.name == "stdout" else ""
    return output.get("data", {}).get("text/plain", "") + "\n"
