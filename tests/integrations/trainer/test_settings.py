"""What a server knows of a training, by the settings that it wrote."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unmask.integrations.trainer.settings import compute_dtype, join_steps, read_optimizer

LAYER = nn.Linear(2, 2)
ADAMW = {"learning_rate": 0.1, "weight_decay": 0.01, "optimizer": "adamw"}
SGD = {"learning_rate": 0.1, "weight_decay": 0.0, "optimizer": "sgd", "momentum": 0.0}


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [({}, torch.float32), ({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16)],
)
def test_the_precision_is_that_of_the_forward_pass(flags, dtype):
    assert compute_dtype(SimpleNamespace(**{"bf16": False, "fp16": False, **flags}), LAYER) is dtype


def test_settings_of_optimizers_that_evidence_knows():
    decayed = [{"params": [LAYER.weight], "weight_decay": 0.01}, {"params": [LAYER.bias], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decayed, lr=0.1)
    assert read_optimizer(adamw) == read_optimizer(SimpleNamespace(optimizer=adamw)) == ADAMW
    assert read_optimizer(torch.optim.SGD(LAYER.parameters(), lr=0.1)) == SGD


def test_of_others_nothing_is_stated():
    two = [{"params": [LAYER.weight], "lr": 0.1}, {"params": [LAYER.bias], "lr": 0.2}]
    assert read_optimizer(torch.optim.SGD(two)) == {}
    assert read_optimizer(torch.optim.RMSprop(LAYER.parameters(), lr=0.1)) == {}
    assert read_optimizer(torch.optim.SGD(LAYER.parameters(), lr=0.0)) == {}
    assert read_optimizer(None) == {}


def test_only_what_all_steps_share_is_stated():
    warm = {**SGD, "learning_rate": 0.2}
    assert join_steps([SGD, SGD], is_fresh=False) == {**SGD, "num_steps": 2}
    stated = join_steps([SGD, warm], is_fresh=True)
    assert "learning_rate" not in stated
    assert stated["num_steps"] == 2
    assert join_steps([], is_fresh=True) == {}


def test_moments_from_before_the_round_are_nobodys_knowledge():
    assert join_steps([ADAMW], is_fresh=True) == {**ADAMW, "num_steps": 1}
    assert join_steps([ADAMW], is_fresh=False) == {"num_steps": 1}
    assert join_steps([{**SGD, "momentum": 0.9}], is_fresh=False) == {"num_steps": 1}
