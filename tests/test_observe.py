"""What the server sees: equal to what the protocol alone makes, defended in order, summed over clients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.audit.made import WORDS, save_bert

import unmask
from unmask import cli
from unmask.defences import parse_defence
from unmask.defences.aggregate import secure_aggregate
from unmask.errors import InputError
from unmask.evidence import load_evidence
from unmask.evidence.gradients import GradientEvidence
from unmask.models import Model
from unmask.observe import ObservedUpdate, observe_update
from unmask.protocols.table import parse_protocol

OPTIONS = {"task": "classification", "seed": 3}


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def model(bert_folder: Path) -> Model:
    return unmask.load_model(str(bert_folder))


def observed(
    model: Model, *defences: str, protocol: str = "fedsgd", texts: int = 2, clients: int = 1
) -> ObservedUpdate:
    return observe_update(
        model,
        WORDS[:texts],
        parse_protocol(protocol),
        [parse_defence(text) for text in defences],
        num_clients=clients,
        generator=torch.Generator().manual_seed(3),
        **OPTIONS,
    )


def assert_same(one: GradientEvidence, other: GradientEvidence) -> None:
    assert one.gradients.keys() == other.gradients.keys()
    for name, tensor in one.gradients.items():
        assert torch.equal(tensor, other.gradients[name]), name


def test_without_defences_it_is_the_protocol_s_update(model):
    seen = observed(model)
    assert_same(seen.evidence, unmask.observe_gradients(model, WORDS[:2], **OPTIONS))
    assert (seen.cosine, seen.epsilon) == (1.0, float("inf"))


def test_defences_come_in_order_and_draw_from_one_generator(model):
    update = unmask.observe_gradients(model, WORDS[:2], **OPTIONS)
    generator = torch.Generator().manual_seed(3)
    for text in ("noise:sigma=0.01", "int8", "noise:sigma=0.02"):
        update = parse_defence(text)(update, generator)
    seen = observed(model, "noise:sigma=0.01", "int8", "noise:sigma=0.02")
    assert_same(seen.evidence, update)
    assert 0 < seen.cosine < 1


def test_of_several_clients_only_the_sum_is_seen(model):
    parts = [unmask.observe_gradients(model, WORDS[start:4:2], **OPTIONS) for start in (0, 1)]
    assert_same(observed(model, texts=4, clients=2).evidence, secure_aggregate(parts))


def test_clients_draw_noise_of_their_own(model):
    generator = torch.Generator().manual_seed(3)
    parts = [
        parse_defence("noise:sigma=0.1")(unmask.observe_gradients(model, WORDS[start:4:2], **OPTIONS), generator)
        for start in (0, 1)
    ]
    assert_same(observed(model, "noise:sigma=0.1", texts=4, clients=2).evidence, secure_aggregate(parts))


def test_the_budget_of_dpsgd(model):
    pytest.importorskip("opacus", reason="Opacus is missing: pip install 'unmask[dp]'")
    seen = observed(model, protocol="dpsgd:noise_multiplier=1")
    assert 0 < seen.epsilon < 100
    with pytest.raises(InputError, match="with dpsgd there must be one"):
        observed(model, protocol="dpsgd:noise_multiplier=1", clients=2)


def test_more_clients_than_texts(model):
    with pytest.raises(InputError, match="3 clients need as many texts, and there are 2"):
        observed(model, clients=3)


def test_the_command_observes_the_same(model, bert_folder, tmp_path, monkeypatch):
    (tmp_path / "texts.txt").write_text("\n".join(WORDS))
    arguments = [
        "observe",
        "gradients",
        "-m",
        bert_folder,
        "-t",
        tmp_path / "texts.txt",
        "-o",
        tmp_path / "u.safetensors",
    ]
    arguments += ["--task", "classification", "--seed", "3", "--batch-size", "4", "--clients", "2", "--json"]
    arguments += ["--defence", "noise:sigma=0.1", "--defence", "int8"]
    monkeypatch.setattr(sys, "argv", ["unmask", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    seen = observed(model, "noise:sigma=0.1", "int8", texts=4, clients=2)
    assert_same(load_evidence(tmp_path / "u.safetensors"), seen.evidence)
