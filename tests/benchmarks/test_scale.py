"""The benchmarks of scale on a tiny shape: what they write is read back, and their rows say what was found."""

from __future__ import annotations

import importlib

import pytest

from unmask.audit.plan import load_plan
from unmask.evidence import files


def test_memory_makes_a_model_and_an_update_and_recovers_its_texts(tmp_path, monkeypatch):
    memory = importlib.import_module("scale.memory")
    for name, value in {"WIDTH": 64, "HIDDEN": 96, "HEADS": 4, "VOCAB": 300}.items():
        monkeypatch.setattr(memory, name, value)
    monkeypatch.setattr(files, "LARGE_BYTES", 1)
    memory.write_model(tmp_path / "model", 2)
    memory.write_model(tmp_path / "model", 2)  # goes on with what is there
    rows = {step: memory.run_step(step, tmp_path, 2, 2) for step in ("observe", *memory.ROWS)}
    assert rows["decoder"]["exact"] == "2/2"
    assert rows["decoder"]["status"].startswith("RECOVERED")
    assert 0 < rows["bag-of-words"]["read_gb"] < rows["bag-of-words"]["update_gb"]
    assert all(row["peak_gb"] >= row["anonymous_gb"] for row in rows.values())


@pytest.mark.parametrize("make", ["small_plan", "real_plan"])
def test_audit_has_as_many_cases_as_it_is_asked_for(tmp_path, make):
    audit = importlib.import_module("scale.audit")
    plan = load_plan(getattr(audit, make)(tmp_path, 40))
    assert len(plan.cases) == 40


def test_the_rate_leaves_out_what_workers_take_to_start():
    audit = importlib.import_module("scale.audit")
    times = [0.0, 50.0, *(51.0 + 0.5 * place for place in range(8))]
    assert audit.rate_of(times) == {"wall": 54.5, "rate": 2.0}
