"""`unmask wrap store`: vectors of real stores as evidence, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.audit.made import WORDS, save_bert, save_llama
from typer.testing import CliRunner

import unmask
from unmask.cli.wrap import wrap
from unmask.errors import EvidenceError, InputError

TEXTS = list(WORDS[:3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def vectors(folder: Path) -> torch.Tensor:
    return unmask.observe_vectors(unmask.load_model(str(folder)), TEXTS).vectors


def run(folder: Path, store: Path, *options: str):
    out = store.parent / "vectors.safetensors"
    arguments = ["store", str(store), "-m", str(folder), "-o", str(out), "--json", *options]
    done = CliRunner().invoke(wrap, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return unmask.load_evidence(out), json.loads(done.stdout)


def test_an_array_becomes_evidence(folder, vectors, tmp_path):
    np.save(tmp_path / "v.npy", vectors.numpy().astype(np.float16))
    evidence, said = run(folder, tmp_path / "v.npy", "--limit", "2")
    assert torch.equal(evidence.vectors, vectors.half().float()[:2])
    assert evidence.half_steps is not None
    assert evidence.recipe.pooling.value == "mean"
    assert said["holds"] == "2 vectors of 64 numbers (mean, length 1); NumPy: v.npy"
    evidence.check(unmask.load_model(str(folder)))


def test_options_reach_the_recipe(folder, vectors, tmp_path):
    np.savez(tmp_path / "v.npz", a=vectors.numpy(), b=-vectors.numpy())
    options = ("-c", "b", "--pooling", "weighted-mean", "--no-normalise", "--prefix", "w7 ")
    evidence, _ = run(folder, tmp_path / "v.npz", *options)
    assert torch.equal(evidence.vectors, -vectors)
    assert (evidence.recipe.pooling.value, evidence.recipe.normalise) == ("weighted_mean", False)
    assert len(evidence.recipe.prefix) == 1


def test_a_faiss_index_brings_its_half_steps(folder, vectors, tmp_path):
    faiss = pytest.importorskip("faiss", reason="comes with the extra 'stores'")
    index = faiss.IndexScalarQuantizer(64, faiss.ScalarQuantizer.QT_8bit)
    index.train(vectors.numpy())
    index.add(vectors.numpy())
    faiss.write_index(index, str(tmp_path / "v.faiss"))
    evidence, said = run(folder, tmp_path / "v.faiss")
    assert ((evidence.vectors - vectors).abs() <= evidence.half_steps).all()
    assert "FAISS: IndexScalarQuantizer of 3 vectors" in said["holds"]


def test_vectors_of_another_width_are_refused(folder, tmp_path):
    np.save(tmp_path / "v.npy", np.ones((2, 65)))
    with pytest.raises(EvidenceError, match="load the model that made them"):
        run(folder, tmp_path / "v.npy")


def test_shorter_vectors_are_taken_only_if_they_are_said_to_be(folder, vectors, tmp_path):
    """Vectors of a narrower model became evidence with exit code 0."""
    np.save(tmp_path / "v.npy", vectors[:, :16].numpy())
    with pytest.raises(InputError, match=r"16 numbers and this \w+ model makes 64.*pass --dimensions 16"):
        run(folder, tmp_path / "v.npy")
    evidence, _ = run(folder, tmp_path / "v.npy", "--dimensions", "16")
    assert evidence.recipe.dimensions == 16


def test_rows_of_logits_become_last_states(tmp_path):
    folder = save_llama(tmp_path / "llama")
    model = unmask.load_model(str(folder))
    with torch.no_grad():
        rows = [model.hf(input_ids=torch.tensor([model.encode(text)])).logits[0, -1] for text in TEXTS]
    np.savez(tmp_path / "rows.npz", rows=torch.stack(rows).log_softmax(-1).numpy())
    np.save(tmp_path / "rows.npy", torch.stack(rows).numpy())
    found = []
    for name in ("rows.npz", "rows.npy"):
        out = tmp_path / f"{name}.safetensors"
        arguments = ["logits", str(tmp_path / name), "-m", str(folder), "-o", str(out), "--limit", "2", "--json"]
        done = CliRunner().invoke(wrap, arguments, catch_exceptions=False)
        assert json.loads(done.stdout)["holds"] == "2 last states of 64 numbers"
        found.append(unmask.load_evidence(out).vectors)
    expected = unmask.observe_next_token(model, TEXTS[:2]).vectors
    assert all(torch.allclose(vectors, expected, atol=1e-3) for vectors in found)


def test_files_that_hold_no_rows_of_logits(folder, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(6).reshape(2, 3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "rows.pt").write_bytes(b"PK\x03\x04")
    parts = {
        "ids.npy": "expected floats",
        "objects.npy": "pickled objects",
        "rows.pt": "numpy.save",
        "no.npy": "no file",
    }
    for name, part in parts.items():
        arguments = ["logits", str(tmp_path / name), "-m", str(folder), "-o", str(tmp_path / "out")]
        with pytest.raises(EvidenceError, match=part):
            CliRunner().invoke(wrap, arguments, catch_exceptions=False)
