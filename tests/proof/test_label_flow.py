"""What labels send to the last block: all of a gradient, and nothing that another label explains."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from unmask.models import Model, Role
from unmask.proof.label_flow import (
    LabelFlow,
    flow_of,
    flows_of,
    is_named,
    label_layer,
    row_of,
    sent_behind,
    share_outside,
    share_unexplained,
    space_of_arrivals,
)
from unmask.protocols import observe_gradients

A, B, C = (5, 17, 99, 17, 250), (400, 3, 8), (44, 45, 46, 47, 48, 49)
FLOAT32 = 2e-5


@pytest.fixture(params=["tiny_gpt2", "tiny_llama", "tiny_qwen2"])
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("role", [Role.MLP_OUT, Role.ATTENTION_OUT])
def test_what_the_labels_of_a_text_send_is_its_gradient(decoder, role):
    gradient = observe_gradients(decoder, [A]).linear(decoder, role, decoder.num_blocks - 1)
    flow = flow_of(decoder, role, A)
    again = flow.hidden.T @ flow.sent / (len(A) - 1)
    torch.testing.assert_close(again, gradient, atol=FLOAT32 * float(gradient.abs().max()), rtol=1e-3)
    wrong = flow_of(decoder, role, (*A[:-1], 60))
    other = wrong.hidden.T @ wrong.sent / (len(A) - 1)
    assert float((other - gradient).norm()) > 1e-2 * float(gradient.norm())


def test_probabilities_are_those_of_the_labels(decoder):
    with torch.no_grad():
        likely = decoder.hf(torch.tensor([A])).logits[0].softmax(-1)
    expected = torch.stack([likely[place, label] for place, label in enumerate(A[1:])])
    torch.testing.assert_close(flow_of(decoder, Role.MLP_OUT, A).probabilities, expected, atol=1e-6, rtol=1e-3)


def test_texts_of_one_length_are_sent_at_once(tiny_llama):
    texts = [A, (7, 8, 9, 10, 11)]
    for text, flow in zip(texts, flows_of(tiny_llama, Role.MLP_OUT, texts), strict=True):
        alone = flow_of(tiny_llama, Role.MLP_OUT, text)
        for left, right in ((flow.hidden, alone.hidden), (flow.sent, alone.sent)):
            torch.testing.assert_close(left, right, atol=FLOAT32, rtol=1e-3)


def test_a_label_that_the_model_is_sure_of_is_silent():
    flow = LabelFlow(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([0.5, 0.9999]))
    assert not flow.is_silent(1)
    assert flow.is_silent(2)


# ---- whether a label is needed


def test_labels_behind_a_prefix_are_those_that_explain_what_arrives(decoder):
    """Two texts that part behind '5 17' have two labels there; each is needed, and no other one is."""
    texts = [(5, 17, 99), (5, 17, 301)]
    flows = {(0, text): flow_of(decoder, Role.MLP_OUT, text) for text in texts}
    arrived = sum(flow.sent[1] for flow in flows.values())
    share = partial(share_unexplained, arrived)
    labels = sent_behind(decoder, flows)[0, (5, 17)]
    assert set(labels) == {99, 301}
    assert all(is_named(labels, label, 1e-2, share) for label in labels)
    made_up = {60: flow_of(decoder, Role.MLP_OUT, (5, 17, 60)).sent[1]}
    assert not is_named(labels | made_up, 60, 1e-2, share)
    assert is_named(labels | made_up, 99, 1e-2, share)
    assert not is_named(made_up, 60, 1e-2, share)
    assert not is_named({99: labels[99]} | made_up, 99, 1e-2, share)  # one of two labels is missing


def test_no_label_has_less_than_no_part():
    ways = torch.eye(3)
    assert share_unexplained(ways[0] + ways[1], ways[:2]) == pytest.approx(0.0, abs=1e-9)
    assert share_unexplained(ways[0] - ways[1], ways[:2]) == pytest.approx(0.5**0.5)
    assert share_unexplained(-ways[0], ways[:1]) == 1.0
    assert share_unexplained(ways[2], ways[:2]) == 1.0


# ---- while texts are missing


def test_labels_of_the_batch_lie_in_the_space_of_what_arrives(decoder):
    space = space_of_arrivals(observe_gradients(decoder, [A, B, C]), decoder, Role.MLP_OUT)
    assert space is not None
    sent = flow_of(decoder, Role.MLP_OUT, A).sent
    for row in sent:
        assert share_outside(space, row[None]) < 1e-3
    wrong = flow_of(decoder, Role.MLP_OUT, (*A[:-1], 60)).sent[-1]
    assert share_outside(space, wrong[None]) > 1e-1
    labels = {250: sent[-1], 60: wrong}
    share = partial(share_outside, space)
    assert is_named({250: sent[-1]}, 250, 1e-3, share)
    assert not is_named({60: wrong}, 60, 1e-3, share)
    assert not is_named(labels, 60, 1e-3, share)


def test_a_space_holds_positive_combinations_alone():
    space = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double().T
    space = torch.linalg.qr(space)[0]
    first, second = torch.eye(3)[:2]
    assert share_outside(space, torch.stack([first, second])) == pytest.approx(0.0, abs=1e-6)
    assert share_outside(space, torch.stack([first, -second])) == 1.0
    assert share_outside(space, first[None]) == pytest.approx(0.5**0.5)


def test_a_space_that_is_everything_tells_nothing(tiny_gpt2):
    generator = torch.Generator().manual_seed(0)
    texts = [tuple(torch.randint(3, 490, (20,), generator=generator).tolist()) for _ in range(6)]
    assert space_of_arrivals(observe_gradients(tiny_gpt2, texts), tiny_gpt2, Role.MLP_OUT) is None
    few = observe_gradients(tiny_gpt2, [A], parameters=["h.0."])
    assert space_of_arrivals(few, tiny_gpt2, Role.MLP_OUT) is None


# ---- parts


def test_the_layer_of_labels_is_the_last_that_the_update_holds(tiny_llama):
    whole = observe_gradients(tiny_llama, [A])
    assert label_layer(whole, tiny_llama) is Role.MLP_OUT
    attention = replace(whole, gradients={n: g for n, g in whole.gradients.items() if "mlp" not in n})
    assert label_layer(attention, tiny_llama) is Role.ATTENTION_OUT
    neither = replace(whole, gradients={n: g for n, g in attention.gradients.items() if "o_proj" not in n})
    assert label_layer(neither, tiny_llama) is None


def test_a_repetition_has_the_row_of_its_first_token_where_positions_are_relative(tiny_llama, tiny_gpt2):
    assert row_of(tiny_llama, 0, (4, 4, 4)) == (0, (4,))
    assert row_of(tiny_gpt2, 0, (4, 4, 4)) == (0, (4, 4, 4))
    for model in (tiny_llama, tiny_gpt2):
        assert row_of(model, 3, (4, 4, 5)) == (3, (4, 4, 5))
