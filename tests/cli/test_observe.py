"""`unmask observe`: evidence files hold what the Python functions give; tests/test_cli.py has what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.audit.made import WORDS, save_llama
from typer.testing import CliRunner

import unmask
from unmask.cli.observe import observe
from unmask.models import Model

TEXTS = list(WORDS[:3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return unmask.load_model(str(folder))


def run(kind: str, folder: Path, tmp_path: Path, *options: str):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    out = tmp_path / "evidence.safetensors"
    arguments = [kind, "-m", str(folder), "-t", str(tmp_path / "texts.txt"), "-o", str(out), "--json", *options]
    done = CliRunner().invoke(observe, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return unmask.load_evidence(out), json.loads(done.stdout)


def same(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)


def test_gradients_are_those_of_the_library(folder, model, tmp_path):
    evidence, said = run("gradients", folder, tmp_path)
    same(evidence.gradients, unmask.observe_gradients(model, TEXTS).gradients)
    assert str(tmp_path / "evidence.safetensors") in str(said)


def test_the_first_texts_and_a_part_of_the_tensors(folder, model, tmp_path):
    evidence, _ = run("gradients", folder, tmp_path, "--batch-size", "2", "--keep", "layers.0.")
    whole = unmask.observe_gradients(model, TEXTS[:2]).gradients
    same(evidence.gradients, {name: tensor for name, tensor in whole.items() if "layers.0." in name})


def test_defences_are_applied_in_their_order(folder, tmp_path):
    options = ("--defence", "clip:norm=1", "--defence", "int8")
    evidence, _ = run("gradients", folder, tmp_path, *options)
    turned, _ = run("gradients", folder, tmp_path, *options[2:], *options[:2])
    assert sum(float(tensor.square().sum()) for tensor in turned.gradients.values()) <= 1 + 1e-5
    name = next(iter(evidence.gradients))
    assert len(evidence.gradients[name].unique()) <= 255
    assert not torch.equal(evidence.gradients[name], turned.gradients[name])


@pytest.mark.parametrize(("options", "layer", "site"), [((), 3, "stream"), (("-l", "1"), 1, "stream")])
def test_states_are_those_of_the_library(folder, model, tmp_path, options, layer, site):
    evidence, _ = run("hidden", folder, tmp_path, *options)
    assert (evidence.layer, evidence.site.value) == (layer, site)
    same({"states": evidence.states}, {"states": unmask.observe_hidden(model, TEXTS, layer=layer).states})


def test_vectors_are_those_of_the_library(folder, model, tmp_path):
    evidence, said = run("vectors", folder, tmp_path)
    same({"v": evidence.vectors}, {"v": unmask.observe_vectors(model, TEXTS, dtype="float32").vectors})
    assert said["holds"] == "3 vectors of 64 numbers (last, float32)"


def test_vectors_are_pooled_stored_and_defended_as_asked(folder, model, tmp_path):
    options = ("--pooling", "weighted-mean", "--no-normalise", "--dimensions", "32", "--dtype", "int8")
    evidence, _ = run("vectors", folder, tmp_path, *options)
    library = unmask.observe_vectors(
        model, TEXTS, pooling="weighted_mean", normalise=False, dimensions=32, dtype="int8"
    )
    same({"v": evidence.vectors, "s": evidence.half_steps}, {"v": library.vectors, "s": library.half_steps})
    turned, _ = run("vectors", folder, tmp_path, *options, "--defence", "rotate", "--defence", "signs")
    assert turned.half_steps is None
    assert not torch.equal(turned.vectors, evidence.vectors)


def test_a_cache_is_that_of_the_library(folder, model, tmp_path):
    options = ("-l", "1", "--parts", "keys", "--head", "1", "--first-position", "1", "--storage", "int8")
    evidence, said = run("cache", folder, tmp_path, *options)
    expected = unmask.observe_cache(model, TEXTS, layer=1, parts="keys", heads=[1], first_position=1, dtype="int8")
    same(evidence.parts, expected.parts)
    assert "keys of block 1" in said["holds"]
    hidden, _ = run("cache", folder, tmp_path, *options, "--defence", "cloak")
    assert not torch.allclose(hidden.keys, evidence.keys)
