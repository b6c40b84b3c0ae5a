"""What contradicts a stated classification, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask.attacks.gradients.decoder.stated_task import why_no_classifier
from unmask.evidence import GradientEvidence
from unmask.evidence.gradients import Task
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
MODELS = ("tiny_gpt2", "tiny_qwen2", "tiny_llama")  # tied, tied, and an output layer of its own


@pytest.mark.parametrize("name", MODELS)
def test_an_output_layer_that_learned_is_told(name, request):
    model = request.getfixturevalue(name)
    evidence = replace(observe_gradients(model, TEXTS), task=Task.CLASSIFICATION)
    assert f"rows of the output layer '{model.unembedding_name}' moved" in why_no_classifier(evidence, model)
    assert why_no_classifier(replace(evidence, task=None), model) == ""
    without = {n: g for n, g in evidence.gradients.items() if n != model.unembedding_name}
    assert why_no_classifier(replace(evidence, gradients=without), model) == ""


@pytest.mark.parametrize("sigma", [0.0, 1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize("name", MODELS)
def test_a_classifier_is_believed_with_noise_on_every_row_too(name, sigma, request):
    model = request.getfixturevalue(name)
    clean = observe_gradients(model, TEXTS, task="classification").gradients
    generator = torch.Generator().manual_seed(0)
    whole = {n: clean.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()}
    noisy = {n: g + sigma * torch.randn(g.shape, generator=generator) for n, g in whole.items()}
    assert why_no_classifier(GradientEvidence.of(model, noisy, task="classification"), model) == ""


def test_as_many_positions_as_the_width_say_nothing(tiny_llama):
    texts = torch.randint(5, 490, (12, 9), generator=torch.Generator().manual_seed(0)).tolist()
    evidence = replace(observe_gradients(tiny_llama, texts), task=Task.CLASSIFICATION)
    assert why_no_classifier(evidence, tiny_llama) == ""
