"""What contradicts a stated classification, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from tests.tiny_models import bert_config, random_model, word_tokenizer

from unmask.attacks.gradients.stated_task import believe
from unmask.evidence import GradientEvidence
from unmask.evidence.gradients import Task, Update
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]


@pytest.fixture(scope="module")
def tiny_bert_lm() -> Model:
    return adapt(random_model(transformers.BertForMaskedLM, bert_config()), word_tokenizer())


def with_noise(evidence: GradientEvidence, sigma: float, model: Model | None = None) -> GradientEvidence:
    """Noise on what was sent; with a model, on all of its parameters."""
    generator = torch.Generator().manual_seed(0)
    sent = dict(evidence.gradients)
    if model is not None and sigma:
        sent = {n: sent.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()}
    noisy = {n: g + sigma * torch.randn(g.shape, generator=generator) for n, g in sent.items()}
    return replace(evidence, gradients=noisy)


MODELS = ("tiny_gpt2", "tiny_qwen2", "tiny_llama")  # tied, tied, and an output layer of its own


@pytest.mark.parametrize("sigma", [0.0, 1e-8, 1e-5])
@pytest.mark.parametrize("name", MODELS)
def test_an_output_layer_that_learned_is_told(name, sigma, request):
    model = request.getfixturevalue(name)
    evidence = replace(with_noise(observe_gradients(model, TEXTS), sigma), task=Task.CLASSIFICATION, pooling="last")
    believed, why = believe(evidence, model)
    assert f"'{model.unembedding_name}' learned to predict tokens" in why
    assert (believed.task, believed.pooling) == (None, None)
    delta = {n: -0.1 * g for n, g in evidence.gradients.items()}
    assert believe(replace(evidence, gradients=delta, update=Update.DELTA, learning_rate=0.1), model)[1]
    assert believe(replace(evidence, task=None), model)[1] == ""
    without = {n: g for n, g in evidence.gradients.items() if n != model.unembedding_name}
    assert believe(replace(evidence, gradients=without), model)[1] == ""


@pytest.mark.parametrize("kept", ["", "embeddings", "predictions"])
@pytest.mark.parametrize("sigma", [0.0, 1e-6])
def test_masked_tokens_are_told_by_the_embedding_or_by_the_head(tiny_bert_lm, sigma, kept):
    evidence = with_noise(observe_gradients(tiny_bert_lm, TEXTS, task="masked_token"), sigma)
    gradients = {n: g for n, g in evidence.gradients.items() if kept in n}
    believed, why = believe(replace(evidence, gradients=gradients, task=Task.CLASSIFICATION), tiny_bert_lm)
    assert "learned to predict tokens" in why
    assert believed.task is None


def test_a_model_without_a_head_may_have_been_given_one(tiny_bert_lm):
    bare = transformers.BertModel(bert_config()).eval()
    bare.load_state_dict(tiny_bert_lm.body.state_dict(), strict=False)
    sent = observe_gradients(tiny_bert_lm, TEXTS, task="masked_token").gradients
    known = {n: g for n, g in sent.items() if "embeddings" in n}
    assert believe(GradientEvidence.of(adapt(bare), known, task="classification"), adapt(bare))[1]


@pytest.mark.parametrize("sigma", [0.0, 1e-9, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("name", [*MODELS, "tiny_bert_lm"])
def test_a_classifier_is_believed_with_noise_on_every_row_too(name, sigma, request):
    model = request.getfixturevalue(name)
    for texts in (TEXTS, torch.randint(5, 490, (12, 9), generator=torch.Generator().manual_seed(0)).tolist()):
        evidence = with_noise(observe_gradients(model, texts, task="classification"), sigma, model)
        assert believe(evidence, model) == (evidence, "")


@pytest.mark.parametrize("name", MODELS)
def test_more_positions_than_the_width(name, request):
    model = request.getfixturevalue(name)
    texts = torch.randint(5, 490, (12, 9), generator=torch.Generator().manual_seed(0)).tolist()
    assert believe(replace(observe_gradients(model, texts), task=Task.CLASSIFICATION), model)[1]
