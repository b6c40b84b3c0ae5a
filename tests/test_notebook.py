"""The notebook runs from its first cell to its last, offline, and is stored without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="the notebook needs nbclient: pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat")  # nbclient brings it

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"
PROMISES = (
    "The biopsy was positive, and the treatment starts on Monday.".lower(),  # MiniLM knows no capitals
    "noise:sigma=0.1: NOT_APPLICABLE",
    "mean: NOTHING_FOUND",
    "round:decimals=2: RECOVERED",
    "norm:max_norm=4 + round:decimals=2: NOTHING_FOUND",
    "A gate is crossed: 'no exact text' by 2 cases",
)


def test_it_is_stored_without_outputs():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
def test_it_keeps_its_promises(minilm, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    missing = [promise for promise in PROMISES if promise not in said]
    assert not missing, said
