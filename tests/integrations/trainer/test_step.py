"""What is taken of a running training, and that nothing of it changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.integrations.trainer.trainings import ROWS, classifier, lora, without_dropout
from tests.tiny_models import word_tokenizer

from unmask.integrations.trainer.step import (
    BatchRecorder,
    copy_model,
    keep_randomness,
    open_model,
    read_change,
    read_gradients,
)

EMBEDDING = "embeddings.word_embeddings.weight"


def batch(*rows):
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


def test_the_recorder_notes_training_and_nothing_else():
    net, recorder = classifier(), BatchRecorder()
    recorder.attach(net)
    net.eval()(**batch(ROWS[0]))
    with torch.no_grad():
        net.train()(**batch(ROWS[1]))
    net.train()(**batch(ROWS[2], ROWS[3]))
    net(batch(ROWS[4])["input_ids"])
    assert recorder.rows == [ROWS[2], ROWS[3], ROWS[4]]
    assert recorder.earlier_rows == []
    recorder.begin()
    assert (recorder.rows, recorder.earlier_rows) == ([], [ROWS[2], ROWS[3], ROWS[4]])
    recorder.detach()
    net(**batch(ROWS[5]))
    assert recorder.rows == []


def test_inputs_that_are_no_tokens_are_left_out():
    recorder = BatchRecorder()
    recorder.note((), {"inputs_embeds": torch.zeros(1, 2, 64)})
    recorder.note((), {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.zeros(1, 2)})
    assert recorder.rows == []


def test_a_copy_stays_when_training_goes_on():
    net, recorder = classifier().train(), BatchRecorder()
    recorder.attach(net)
    net.forward = net.forward  # as accelerate does for mixed precision
    copied = copy_model(net, recorder)
    assert not copied.training
    assert net.training
    assert "forward" in net.__dict__
    assert "forward" not in copied.__dict__
    assert not copied._forward_pre_hooks
    assert len(net._forward_pre_hooks) == 1
    with torch.no_grad():
        net.classifier.weight.add_(1)
    assert not torch.equal(copied.classifier.weight, net.classifier.weight)


def test_frozen_weights_are_shared_but_not_their_gradients():
    pytest.importorskip("peft", reason="PEFT is missing; run: pip install 'unmask[lora]'")
    net = lora()
    frozen = net.get_base_model().model.embed_tokens.weight
    model = open_model(copy_model(net, BatchRecorder()), word_tokenizer())
    shared = model.hf.model.embed_tokens.weight
    assert shared.data_ptr() == frozen.data_ptr()
    assert shared.requires_grad
    assert not frozen.requires_grad
    assert model.adapters is not None


def test_gradients_are_copies_under_canonical_names():
    net = classifier()
    net(**batch(ROWS[0]), labels=torch.tensor([1])).loss.backward()
    gradients = read_gradients(net, open_model(copy_model(net, BatchRecorder()), None))
    assert {EMBEDDING, "classifier.weight"} <= set(gradients)
    assert torch.equal(gradients[EMBEDDING], net.bert.embeddings.word_embeddings.weight.grad)
    gradients[EMBEDDING].zero_()
    assert net.bert.embeddings.word_embeddings.weight.grad.any()


def test_changes_are_those_of_the_weights():
    net = without_dropout()
    before = copy_model(net, BatchRecorder())
    model = open_model(before, None)
    with torch.no_grad():
        net.model.embed_tokens.weight[7] += 0.5
    change = read_change(net, before, model)
    (name,) = (name for name, tensor in change.items() if tensor.any())
    assert change[name].any(1).nonzero().flatten().tolist() == [7]


def test_random_numbers_go_on_as_before():
    def draw():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    expected = draw()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    with keep_randomness():
        torch.manual_seed(1)
        draw()
    assert draw() == expected
