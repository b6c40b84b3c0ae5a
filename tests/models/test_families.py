"""Models of many families, asked and never named: their own states, and the texts of a batch from its gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.models.families import DECODERS, ENCODERS, build
from tests.models.own_classes import OwnBody, OwnConfig, OwnForCausalLM

import unmask
from unmask.attacks.gradients.encoder.attack import EncoderAttack
from unmask.models import Model, adapt
from unmask.models.linear import Role
from unmask.recovery import Recovery, Status

START, END = 101, 102
TEXTS = [(11, 12, 13, 14, 15), (21, 22, 23), (31, 32, 33, 34, 35, 36), (41, 42)]
FRAMED = [(START, *text, END) for text in TEXTS]
# What a family does not give, and why.
NO_DOWN_PROJECTION = {"Mixtral"}  # its experts are no linear layers
NO_TEXTS = {"Albert": "block 0's queries, keys or values", "ModernBert": "positions"}
FLOAT32_PARITY = 1e-5


@pytest.fixture(scope="module", params=[*DECODERS, *ENCODERS])
def family(request: pytest.FixtureRequest) -> tuple[str, Model]:
    return request.param, adapt(build(request.param))


@torch.no_grad()
def test_states_and_logits_are_the_models_own(family):
    _, model = family
    tokens = torch.randint(5, 400, (3, 9), generator=torch.Generator().manual_seed(0))
    theirs = model.hf(input_ids=tokens, output_hidden_states=True)
    ours = model.hidden_states(tokens)
    assert len(ours) == model.num_blocks + 1
    for one, other in zip(ours[:-1], theirs.hidden_states[:-1], strict=True):
        assert float((one - other).norm() / other.norm()) < FLOAT32_PARITY
    assert float((model.token_head.logits(ours[-1]) - theirs.logits).norm() / theirs.logits.norm()) < FLOAT32_PARITY


def recovered(recovery: Recovery) -> Counter:
    return Counter({text.tokens: text.count for text in recovery.value.texts if text.certain})


def test_a_batch_is_recovered_from_its_gradients(family):
    name, model = family
    texts = TEXTS if model.causal else FRAMED
    evidence = unmask.observe_gradients(model, texts, task="next_token" if model.causal else "classification")
    attack = None if model.causal else EncoderAttack(frame=(START, END))
    recovery = unmask.recover_text(evidence, model, attack=attack)
    seen = {token for text in texts for token in (text[:-1] if model.causal else text)}
    assert recovery.value.token_set == seen
    if name in NO_DOWN_PROJECTION:
        assert model.linear(Role.MLP_OUT, 0) is None
        assert sorted(text.tokens for text in recovery.value.texts) == sorted(text[:-1] for text in texts)
    elif name in NO_TEXTS:
        assert NO_TEXTS[name] in recovery.reason
    else:
        assert recovery.status is Status.RECOVERED, recovery.reason
        assert recovered(recovery) == Counter(texts)


def test_prompts_are_recovered_from_the_last_hidden_states(family):
    _, model = family
    recovery = unmask.recover_text(unmask.observe_hidden(model, TEXTS, site="final_norm"), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovered(recovery) == Counter(TEXTS)


def own(kind: type, both_ways: bool) -> Model:
    """A class that nobody knows, with noise on every parameter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        hf = kind(OwnConfig(both_ways=both_ways))
        for parameter in hf.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return adapt(hf.eval())


def test_a_decoder_of_nobodys_family():
    model = own(OwnForCausalLM, both_ways=False)
    assert (model.causal, model.num_blocks, model.num_heads) == (True, 2, 4)
    roles = {role: model.linear(role, 1).module for role in Role if model.linear(role, 1) is not None}
    assert roles == {
        Role.QUERY: "stages.1.mixer.keys_and_queries",
        Role.KEY: "stages.1.mixer.keys_and_queries",
        Role.VALUE: "stages.1.mixer.contents",
        Role.ATTENTION_OUT: "stages.1.leave",
        Role.MLP_IN: "stages.1.widen",
        Role.MLP_OUT: "stages.1.narrow",
    }
    assert model.linear(Role.KEY, 0).columns == range(64)
    assert model.linear(Role.QUERY, 0).columns == range(64, 128)
    recovery = unmask.recover_text(unmask.observe_gradients(model, TEXTS), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovered(recovery) == Counter(TEXTS)


def test_an_encoder_of_nobodys_family():
    model = own(OwnBody, both_ways=True)
    assert not model.causal
    evidence = unmask.observe_gradients(model, FRAMED, task="classification")
    recovery = unmask.recover_text(evidence, model, attack=EncoderAttack(frame=(START, END)))
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovered(recovery) == Counter(FRAMED)
