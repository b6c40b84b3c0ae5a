"""Replays by sketches: the right batch agrees, a wrong one does not, and no tensor is left out."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.nn import functional

from unmask.models import Model
from unmask.proof import sketched_replay
from unmask.proof.agreement import agree
from unmask.proof.gradient_sketches import Sketch
from unmask.proof.replay import replay
from unmask.proof.sketched_replay import replay_sketched, run_client
from unmask.protocols import observe_gradients

TEXTS = [(5, 9, 3, 7), (4, 4, 8), (5, 9, 3, 7), (2, 6, 1, 3, 9, 11)]


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Model:
    """Conv1D with tied embeddings; Linear."""
    return request.getfixturevalue(request.param)


def test_a_sketch_is_the_formed_gradient_times_its_ways(model):
    formed = replay(observe_gradients(model, TEXTS), model, TEXTS)
    sketches = replay_sketched(observe_gradients(model, TEXTS), model, Counter(TEXTS))
    assert sketches is not None
    assert set(sketches) == set(formed)
    for name, found in sketches.items():
        expected = found.of(formed[name]) if isinstance(found, Sketch) else formed[name]
        value = found.value if isinstance(found, Sketch) else found
        assert float((value - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-7, name
    assert any(isinstance(found, Sketch) for found in sketches.values())


@pytest.mark.parametrize("kept", [None, ["attn"], ["mlp"], ["norm", "ln_"], ["wte", "embed"]])
def test_the_right_batch_agrees_and_a_wrong_one_does_not(model, kept):
    """Whatever the update holds: layers below which nothing is trained get their sketches, too."""
    evidence = observe_gradients(model, TEXTS, parameters=kept)
    right = agree(evidence, replay_sketched(evidence, model, Counter(TEXTS)))
    assert right.holds
    assert right.num_tensors == len(evidence.gradients)
    wrong = Counter([(5, 9, 3, 8), *TEXTS[1:]])
    assert not agree(evidence, replay_sketched(evidence, model, wrong)).holds
    once = Counter(dict.fromkeys(TEXTS, 1))
    assert not agree(evidence, replay_sketched(evidence, model, once)).holds_up_to_scale


def test_other_clients_are_not_sketched(model):
    classification = observe_gradients(model, TEXTS, task="classification")
    assert replay_sketched(classification, model, Counter(TEXTS)) is None
    assert replay_sketched(observe_gradients(model, TEXTS), model, Counter([(3,)])) is None


def test_a_layer_that_is_not_called_is_not_left_out_of_the_comparison(tiny_llama, monkeypatch):
    """Its weight is used all the same: then there are no sketches at all, and gradients are formed."""
    evidence = observe_gradients(tiny_llama, TEXTS)
    mlp = tiny_llama.hf.model.layers[0].mlp
    direct = lambda x: functional.linear(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight)  # noqa: E731
    monkeypatch.setattr(mlp, "forward", direct)
    assert replay_sketched(evidence, tiny_llama, Counter(TEXTS)) is None


def test_labels_may_come_behind_the_forward_pass(model):
    evidence = observe_gradients(model, TEXTS)
    run = [text[:-1] for text in TEXTS] + [(5, 9, 3, 1, 2)]  # one more that predicts nothing
    client = run_client(evidence, model, run)
    assert client is not None
    assert [part.logits.shape[:2] for part in client.passes] == [part.last_stream.shape[:2] for part in client.passes]
    found, expected = (replay_sketched(evidence, model, Counter(TEXTS), given) for given in (client, None))
    assert agree(evidence, found).holds
    assert set(found) == set(expected)
    assert not client.passes  # sent back once
    assert agree(evidence, replay_sketched(evidence, model, Counter(TEXTS), client)).holds  # run anew


def test_texts_that_were_not_run_are_run_then(model):
    evidence = observe_gradients(model, TEXTS)
    client = run_client(evidence, model, [text[:-1] for text in TEXTS[:2]])
    assert agree(evidence, replay_sketched(evidence, model, Counter(TEXTS), client)).holds
    wrong = run_client(evidence, model, [text[:-1] for text in TEXTS])
    assert not agree(evidence, replay_sketched(evidence, model, Counter([(5, 9, 3, 8), *TEXTS[1:]]), wrong)).holds


def test_frozen_weights_stay_frozen_between_the_passes(model):
    evidence = observe_gradients(model, TEXTS)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        model.hf.requires_grad_(False)
        client = run_client(evidence, model, [text[:-1] for text in TEXTS])
        assert not any(parameter.requires_grad for parameter in model.hf.parameters())
        assert agree(evidence, replay_sketched(evidence, model, Counter(TEXTS), client)).holds
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])


def test_graphs_that_are_too_large_are_not_kept(model, monkeypatch):
    monkeypatch.setattr(sketched_replay, "_ROWS_AT_ONCE", 4)
    evidence = observe_gradients(model, TEXTS)
    assert run_client(evidence, model, [text[:-1] for text in TEXTS]) is None
    assert agree(evidence, replay_sketched(evidence, model, Counter(TEXTS))).holds
