"""The front door."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.outputs.attention_layers import random_layer

from unmask.attacks.outputs.layer_inputs.attack import AttentionAttack
from unmask.attacks.recover import recover_inputs
from unmask.evidence.outputs import AttentionEvidence
from unmask.linalg.softmax_attention import AttentionMap
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
    recovery = recover_inputs(evidence, seed=5, progress=lambda stage, done, total: total and stages.append(stage))
    assert recovery.value.num_converged == AttentionAttack(seed=5)(evidence).value.num_converged
    assert stages == ["solving from the output itself", "searching for other pre-images"]


def sharp_layer(seed: int) -> AttentionEvidence:
    """A layer of any sharpness from 1e-6 to 300, with tokens of any size."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 5, (1,), generator=generator))
    d = int(torch.randint(max(1, n - 1), 8, (1,), generator=generator))
    scale = 10 ** float(torch.empty(1).uniform_(-6, 2.5, generator=generator))
    size = 10 ** float(torch.empty(1).uniform_(-2, 1.5, generator=generator))
    W, V = (torch.randn(d, d, generator=generator, dtype=torch.float64) for _ in range(2))
    if torch.rand(1, generator=generator) < 0.3:
        V = torch.linalg.qr(V).Q
    X = size * torch.randn(n, d, generator=generator, dtype=torch.float64)
    causal = bool(torch.rand(1, generator=generator) < 0.6)
    return AttentionEvidence(W, V, AttentionMap(scale * W, causal)(X) @ V, causal=causal, scale=scale)


@pytest.mark.parametrize("seed", [6, 161, 268, 394, 2254])
def test_singular_layers_end_in_a_sentence(seed):
    """They raised OverflowError (a ball of radius 1e110, cubed) and LinAlgError (an inverse that is not finite).

    The last one has so many pre-images that comparing them took hours: its attention is saturated.
    """
    recovery = recover_inputs(sharp_layer(seed))
    assert recovery.status is not Status.RECOVERED
    assert recovery.reason
