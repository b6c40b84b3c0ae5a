"""The front door."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.outputs.attention_layers import random_layer

from unmask.attacks.outputs.attention import AttentionAttack
from unmask.attacks.outputs.inputs import recover_inputs
from unmask.recovery import Status

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_front_door_is_the_default_attack():
    evidence, X = random_layer("pd", 4, 8)
    recovery, same = recover_inputs(evidence), AttentionAttack()(evidence)
    assert recovery.status is Status.RECOVERED
    assert torch.equal(recovery.value.X, same.value.X)
    assert torch.allclose(recovery.value.X, X, atol=1e-10)


def test_the_seed_and_the_progress_are_passed_on():
    evidence, _ = random_layer("gauss", 3, 6)
    stages: list[str] = []
    recovery = recover_inputs(evidence, seed=5, progress=lambda stage, done, total: stages.append(stage))
    assert recovery.value.num_converged == AttentionAttack(seed=5)(evidence).value.num_converged
    assert stages == ["solving from the output itself", "searching for other pre-images"]
