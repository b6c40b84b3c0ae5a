"""Local training: its steps against torch's optimisers by hand, and settings that do not go together."""

import pytest
import torch

from unmask.errors import InputError
from unmask.protocols.client import Client
from unmask.protocols.local_training import LocalTraining

TEXTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_are_those_of_torch(tiny_gpt2, optimizer):
    training = LocalTraining(
        local_steps=3, optimizer=optimizer, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5
    )
    client = Client(tiny_gpt2, TEXTS)
    assert training.run(client, train_mode=False, seed=0) == 3
    by_hand = Client(tiny_gpt2, TEXTS).eval()
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    descent = kind(by_hand.parameters(), 1e-3, weight_decay=0.1)
    for _ in range(3):
        descent.zero_grad()
        by_hand(by_hand.batch(by_hand.rows), by_hand.rows).mean().backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        descent.step()
    pairs = zip(client.parameters(), by_hand.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 1), ({"epochs": 2}, 2), ({"epochs": 2, "batch_size": 2}, 4), ({"local_steps": 5, "batch_size": 2}, 5)],
)
def test_the_number_of_steps(tiny_gpt2, settings, steps):
    assert LocalTraining(**settings).run(Client(tiny_gpt2, TEXTS), train_mode=False, seed=0) == steps


def test_usual_learning_rates():
    assert LocalTraining().rate == 0.01
    assert LocalTraining(optimizer="adamw").rate == 5e-5
    assert LocalTraining(learning_rate=0.3).rate == 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": 2, "epochs": 1}, "either local_steps steps or epochs"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adamw"),
        ({"momentum": 1.0}, "momentum must be below 1"),
        ({"momentum": 0.9, "optimizer": "adamw"}, "moments of its own"),
        ({"autocast": torch.float16}, "float16 needs a scaled loss"),
        ({"learning_rate": 0.0}, "learning_rate"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(InputError, match=message):
        LocalTraining(**settings)


def test_training_that_diverges_says_so(tiny_gpt2):
    with pytest.raises(InputError, match="diverged"):
        LocalTraining(local_steps=4, learning_rate=1e30).run(Client(tiny_gpt2, TEXTS), train_mode=False, seed=0)
