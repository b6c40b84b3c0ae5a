"""The notebooks of the site: stored without outputs, and each keeps its promises when it is executed, offline."""

from __future__ import annotations

import sys

import pytest
from tests.docs.pages import NOTEBOOKS, ROOT

pytest.importorskip("nbclient", reason="notebooks need nbclient: pip install 'unmask[docs]'")
nbformat = pytest.importorskip("nbformat")  # nbclient brings it
sys.path.append(str(ROOT / "docs" / "mkdocs"))
notebook_pages = pytest.importorskip("notebook_pages")  # a file of the site, no package

# What each notebook prints, among other things.
PROMISES = {
    "captured-update": (
        "RECOVERED ['The alarm code of the side entrance is the founding year.']",
        "the bag of words (10 tokens) was recovered",
    ),
    "flower": (
        "leaks - PARTIAL",
        " bern on the first of september.",
        " the interview with the minister was cancelled.",
    ),
    "gradients": (
        "certain: The biopsy was positive, and the treatment starts on Monday.",
        "holds: True",
        "100% of the texts are exact, 0 false",
        "noise:sigma=0.1: NOT_APPLICABLE",
    ),
    "outputs": (
        "RECOVERED - The spare key lies under the blue flower pot behind the garage.",
        "NOTHING_FOUND",
        "RECOVERED - 1 input explains the output",
    ),
    "queries": ("RECOVERED - 4 heads", "round:decimals=2: RECOVERED, 4 of 4 heads", "NOTHING_FOUND, 0 of 4 heads"),
}
NEEDS = {"captured-update": "peft", "flower": "flwr"}


def test_every_notebook_has_promises():
    assert {notebook.stem for notebook in NOTEBOOKS} == set(PROMISES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_a_title(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_keeps_its_promises(path, minilm, smollm2):
    pytest.importorskip(NEEDS.get(path.stem, "nbclient"), reason="the notebook needs an extra")
    page = notebook_pages.write_page(notebook_pages.execute(path), path.name)
    missing = [promise for promise in PROMISES[path.stem] if promise not in page]
    assert not missing, page


def test_a_page_shows_what_was_printed_and_hides_warnings():
    printed = nbformat.v4.new_output("stream", name="stdout", text="seen\n")
    warning = nbformat.v4.new_output("stream", name="stderr", text="hidden\n")
    value = nbformat.v4.new_output("execute_result", data={"text/plain": "42"})
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("f()")]
    cells[1].outputs = [printed, warning, value]
    page = notebook_pages.write_page(nbformat.v4.new_notebook(cells=cells), "title.ipynb")
    assert '```text title="prints"\nseen\n42\n```' in page
    assert "hidden" not in page
    assert page.startswith('# Title\n\n<a href="title.ipynb" download>')
