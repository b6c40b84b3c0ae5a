"""Differences of weights: which are read, which steps had a gradient, and what rounding leaves of a step."""

from dataclasses import replace

import pytest
import torch

from unmask import recover_text
from unmask.attacks.gradients.bag_of_words.weight_changes import (
    WeightChange,
    adapter_changes,
    find_nothing,
    last_place,
    layer_changes,
)
from unmask.protocols import observe_fedavg, observe_lora
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 250], [400, 3, 9]]


def test_factors_have_no_gradient_while_their_partners_are_zero(tiny_llama):
    first = list(adapter_changes(observe_lora(tiny_llama, TEXTS, local_steps=3), tiny_llama))
    later = list(adapter_changes(observe_lora(tiny_llama, TEXTS, local_steps=3, steps=1), tiny_llama))
    assert first
    assert all((change.num_steps, change.begins_at_zero) == (3, True) and change.num_gradients == 2 for change in first)
    assert all((change.num_steps, change.num_gradients) == (3, 3) and change.is_factor for change in later)


def test_any_number_of_steps_may_be_stated(tiny_llama):
    """A list with an entry for each step would not fit into memory."""
    stated = replace(observe_lora(tiny_llama, TEXTS, local_steps=2), num_steps=10**12)
    assert all(change.num_gradients == 10**12 - 1 for change in adapter_changes(stated, tiny_llama))
    layers = replace(observe_fedavg(tiny_llama, TEXTS), num_steps=10**12)
    assert all(change.num_gradients == 10**12 for change in layer_changes(layers, tiny_llama))
    assert recover_text(stated, tiny_llama).status is Status.NOT_APPLICABLE


def test_layers_are_read_with_inputs_as_columns(tiny_gpt2):
    changes = list(layer_changes(observe_fedavg(tiny_gpt2, TEXTS), tiny_gpt2))
    assert changes
    assert all(change.delta.shape == change.weights.shape and change.delta.shape[1] == 64 for change in changes)


@pytest.mark.parametrize(("decay", "most"), [(0.0, 2.0), (0.01, 1.8), (0.1, 3.0)])  # weights near zero are rounded more
def test_a_step_is_known_up_to_its_rounding(decay, most):
    draw = torch.Generator().manual_seed(0)
    before, rate, steps = 0.05 * torch.randn(8, 500, generator=draw), 5e-5, 4
    after, total = before.clone(), torch.zeros(8, 500, dtype=torch.float64)
    for _ in range(steps):
        step = torch.randn(8, 500, generator=draw).sign()
        after = after * (1 - rate * decay) - rate * step
        total += step
    change = WeightChange("a", after - before, before, steps)
    read, sigma = change.read_step(rate, decay)
    ratio = float(((read - total) / sigma).square().mean().sqrt())
    assert 0.5 < ratio < most


def test_the_last_place_of_float32():
    ones = torch.tensor([1.0, 1.5, 2.0, 0.75], dtype=torch.float64)
    expected = torch.tensor([1.0, 1.0, 2.0, 0.5], dtype=torch.float64) * torch.finfo(torch.float32).eps
    assert torch.equal(last_place(ones, torch.zeros(4), torch.float32), expected)


def test_nothing_says_why():
    nothing = find_nothing("no reason", ("a",))
    assert len(nothing.tokens) == 0
    assert (nothing.reason, nothing.used, nothing.expected_false) == ("no reason", ("a",), 0.0)
