"""A replay against few digits and noise: it agrees with the right update alone, and says when it could not tell."""

import pytest
import torch

from unmask.defences import parse_defence
from unmask.proof.noisy_agreement import Loss, agree_with_noise, loss_of
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8, 21]]
NUM_LABELS = 7


def defended(evidence, defence, seed=1):
    return parse_defence(defence)(evidence, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def clean(tiny_llama):
    return observe_gradients(tiny_llama, TEXTS)


@pytest.mark.parametrize(
    ("defence", "loss"),
    [("bf16", Loss.DIGITS), ("int8", Loss.DIGITS), ("topk:share=0.3", Loss.DIGITS), ("noise:sigma=1e-4", Loss.NOISE)],
)
def test_the_right_update_agrees_and_another_does_not(tiny_llama, clean, defence, loss):
    seen = defended(clean, defence)
    assert loss_of(seen) is loss
    assert agree_with_noise(seen, clean.gradients, NUM_LABELS).holds
    other = observe_gradients(tiny_llama, [[5, 17, 99, 17, 251], TEXTS[1]]).gradients
    assert not agree_with_noise(seen, other, NUM_LABELS).agreement.holds


@pytest.mark.parametrize("defence", ["noise:sigma=1", "topk:share=0.000001"])
def test_where_nothing_is_left_nothing_is_told(clean, defence):
    assert not agree_with_noise(defended(clean, defence), clean.gradients, NUM_LABELS).holds


def test_one_label_among_very_many_does_not_show_under_noise(clean):
    found = agree_with_noise(defended(clean, "noise:sigma=1e-3"), clean.gradients, 10**7)
    assert found.agreement.holds
    assert not found.is_telling


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_looks_like_noise(clean, seed):
    assert agree_with_noise(defended(clean, "noise:sigma=1e-4", seed), clean.gradients, NUM_LABELS).holds
