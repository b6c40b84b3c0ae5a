"""Protocols as text: round trip, the same update as the function, errors that say what is known."""

import pytest
import torch

from unmask.errors import InputError
from unmask.protocols.fedavg import observe_fedavg
from unmask.protocols.fedsgd import observe_gradients
from unmask.protocols.table import PROTOCOLS, Protocol, parse_protocol

TEXTS = [[5, 17, 99, 17], [400, 3, 8]]


def equal(left, right):
    return left.gradients.keys() == right.gradients.keys() and all(
        torch.equal(left.gradients[name], right.gradients[name]) for name in left.gradients
    )


@pytest.mark.parametrize("name", PROTOCOLS)
def test_examples_come_back(name):
    protocol = parse_protocol(PROTOCOLS[name].example)
    assert protocol.name == name
    assert parse_protocol(str(protocol)) == protocol


def test_fedsgd_is_observe_gradients(tiny_gpt2):
    update = parse_protocol("fedsgd")(tiny_gpt2, TEXTS, task="next_token")
    assert update.epsilon == float("inf")
    assert equal(update.evidence, observe_gradients(tiny_gpt2, TEXTS, task="next_token"))


def test_settings_reach_the_client(tiny_gpt2):
    text = "fedavg: local_steps=2, learning_rate=0.05, optimizer=sgd"
    update = parse_protocol(text)(tiny_gpt2, TEXTS, task="next_token")
    same = observe_fedavg(tiny_gpt2, TEXTS, local_steps=2, learning_rate=0.05, task="next_token")
    assert equal(update.evidence, same)


def test_a_private_update_has_a_budget(tiny_bert):
    text = "dpsgd:noise_multiplier=1,max_grad_norm=1,dataset_size=100"
    update = parse_protocol(text)(tiny_bert, TEXTS, task="classification")
    assert 0 < update.epsilon < 10


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("fedprox", "fedavg:local_steps=4"),
        ("fedavg:steps=4", "local_steps"),
        ("fedavg:local_steps", "local_steps"),
        ("fedavg:local_steps=1,local_steps=2", "local_steps=2"),
        ("fedavg:local_steps=many", "must be a whole number"),
        ("fedsgd:rate=1", "it has no settings"),
        ("fedavg:local_steps=1,epochs=3", "either local_steps steps or epochs passes"),
        ("fedavg:optimizer=adamw,momentum=0.9", "moments of its own"),
        ("fedavg:learning_rate=0", "learning_rate"),
        ("dpsgd:sample_rate=0.1,dataset_size=100", "both were given"),
        ("dpsgd:sample_rate=2", "sample_rate must lie in"),
    ],
)
def test_mistakes_are_explained(text, part):
    with pytest.raises(InputError, match=part):
        parse_protocol(text)


def test_one_protocol_has_one_text():
    assert str(Protocol("lora", {"steps": 1, "rank": 4})) == "lora:rank=4,steps=1"
    assert str(parse_protocol("fedavg:momentum=0,local_steps=1")) == "fedavg"
    assert str(parse_protocol("lora")) == "lora:rank=8"
    assert str(parse_protocol("dpsgd:steps=1")) == "dpsgd:noise_multiplier=1,max_grad_norm=1,steps=1"
