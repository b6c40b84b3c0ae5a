"""Tensors that were captured elsewhere: what is taken, what is renamed, what is recognised and refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.tiny_models import bert_config, random_model
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence import GradientEvidence
from unmask.evidence.captured import name_tensors, refuse_weights, trains_classifier
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients

TEXTS = [[5, 6, 7, 8], [9, 10, 11]]


def gradients_of(model: Model, **options) -> dict[str, Tensor]:
    """Of a real batch, under transformers' own names."""
    seen = observe_gradients(model, TEXTS, **options).gradients
    return {
        name: seen[model.canonical_name(name)]
        for name, _ in model.hf.named_parameters()
        if model.canonical_name(name) in seen
    }


def task_of(model: Model) -> str:
    return "next_token" if model.causal else "classification"


# Weights in the place of gradients


@pytest.mark.parametrize("part", ["all", "embedding", "vectors"])
def test_weights_are_told_from_gradients(tiny, part):
    """A whole state_dict; the word embedding alone, of which a bag of the whole vocabulary was made; vectors alone."""
    weights = {name: p.detach() for name, p in tiny.hf.named_parameters()}
    if part == "embedding":
        weights = {name: w for name, w in weights.items() if tiny.canonical_name(name) == tiny.token_embedding}
    if part == "vectors":
        weights = {name: w for name, w in weights.items() if w.ndim == 1}
    with pytest.raises(EvidenceError, match=r"the model's weights, not gradients.*new − old"):
        GradientEvidence.of(tiny, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_after_some_training_are_still_weights(tiny_gpt2, dtype):
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: (p + 0.1 * p.std() * torch.randn(p.shape, generator=noise)).detach().to(dtype)
        for name, p in tiny_gpt2.hf.named_parameters()
    }
    with pytest.raises(EvidenceError, match="the model's weights"):
        GradientEvidence.of(tiny_gpt2, weights, update="delta")


def test_one_matrix_of_weights_among_gradients_is_named(tiny_gpt2):
    mixed = gradients_of(tiny_gpt2)
    mixed["transformer.h.1.mlp.c_fc.weight"] = tiny_gpt2.parameter("h.1.mlp.c_fc.weight")
    with pytest.raises(EvidenceError, match=r"'h\.1\.mlp\.c_fc\.weight' is almost equal"):
        GradientEvidence.of(tiny_gpt2, mixed)


def test_gradients_and_small_steps_are_no_weights(tiny):
    """Nor is a step of weight decay, which is parallel to the weights but a thousandth of them."""
    GradientEvidence.of(tiny, gradients_of(tiny, task=task_of(tiny)))
    decay = {name: -1e-3 * p.detach() for name, p in tiny.hf.named_parameters()}
    GradientEvidence.of(tiny, decay, update="delta")
    GradientEvidence.of(tiny, {name: torch.zeros_like(p) for name, p in tiny.hf.named_parameters()})


def test_adapters_in_the_place_of_their_gradients():
    factor = torch.randn(4, 64)
    with pytest.raises(EvidenceError, match="the model's weights"):
        refuse_weights({"q.lora_A.weight": factor}, {"q.lora_A.weight": factor})


# What is taken


def test_gradients_of_frozen_layers_are_left_out(tiny_gpt2):
    update: dict[str, Tensor | None] = dict(gradients_of(tiny_gpt2))
    frozen = next(iter(update))
    update[frozen] = None
    evidence = GradientEvidence.of(tiny_gpt2, update)
    assert len(evidence.gradients) == len(update) - 1


def test_arrays_are_taken(tiny_gpt2):
    update = gradients_of(tiny_gpt2)
    arrays = {name: tensor.numpy() for name, tensor in update.items()}
    evidence = GradientEvidence.of(tiny_gpt2, arrays)
    for name, tensor in update.items():
        assert torch.equal(evidence.gradients[tiny_gpt2.canonical_name(name)], tensor)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_module.", "_fsdp_wrapped_module."]
)
def test_names_of_wrappers_are_stripped(tiny, prefix):
    update = gradients_of(tiny, task=task_of(tiny))
    wrapped = name_tensors(tiny, {prefix + name: tensor for name, tensor in update.items()})
    assert set(wrapped) == {tiny.canonical_name(name) for name in update}


def test_a_wrapper_inside_of_a_name_is_stripped(tiny_gpt2):
    assert list(name_tensors(tiny_gpt2, {"transformer.h.0._orig_mod.ln_1.weight": torch.ones(64)})) == [
        "h.0.ln_1.weight"
    ]


def test_a_dtype_may_be_given_by_its_name(tiny_gpt2):
    for name in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert (
            GradientEvidence.of(tiny_gpt2, gradients_of(tiny_gpt2), compute_dtype=name).compute_dtype is torch.bfloat16
        )


# What is refused


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.ones(3)], r"must come with their names, got list.*named_parameters"),
        (torch.ones(3), "must come with their names, got Tensor"),
        ({"wte.weight": object()}, "'wte.weight' must be a tensor or an array of numbers, got an object of object"),
        ({"wte.weight": torch.ones(3, dtype=torch.int8)}, "'wte.weight' holds int8, expected floating-point numbers"),
        ({"wte.weight": torch.ones(3), "module.wte.weight": torch.ones(3)}, "two of the tensors are 'wte.weight'"),
    ],
)
def test_what_is_no_update_is_refused(tiny_gpt2, tensors, words):
    with pytest.raises(EvidenceError, match=words):
        GradientEvidence.of(tiny_gpt2, tensors)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            {"task": "next-token"},
            "task must be one of 'next_token', .*'masked_token', got 'next-token'",
        ),
        ({"update": "weights"}, "update must be one of 'gradient', 'delta', got 'weights'"),
        ({"compute_dtype": "float99"}, "compute_dtype must be a float type .* got 'float99'"),
        ({"compute_dtype": torch.int8}, "compute_dtype must be a float type"),
    ],
)
def test_a_misspelt_name_is_refused(tiny_gpt2, known, words):
    with pytest.raises(EvidenceError, match=words):
        GradientEvidence.of(tiny_gpt2, gradients_of(tiny_gpt2), **known)


def test_a_model_of_transformers_must_be_loaded_first():
    hf = random_model(transformers.BertForMaskedLM, bert_config())
    with pytest.raises(EvidenceError, match=r"got BertForMaskedLM; call load_model\(model\) first"):
        GradientEvidence.of(hf, {})
    assert adapt(hf).adapters is None


# What the client trained for


HEAD = {"classifier.weight": torch.ones(2, 32), "classifier.bias": torch.ones(2)}


def test_a_head_tells_what_was_trained(tiny_gpt2):
    """Whether rows of the embedding name words depends on it: heads that predict tokens may borrow them."""
    body = adapt(random_model(transformers.BertModel, bert_config()))
    assert trains_classifier(body, HEAD)
    assert not trains_classifier(body, {})
    assert not trains_classifier(body, {**HEAD, "cls.predictions.bias": torch.ones(body.vocab_size)})
    assert not trains_classifier(body, {**HEAD, "decoder.weight": torch.ones(body.vocab_size, 32)})
    own = adapt(random_model(transformers.BertForSequenceClassification, bert_config()))
    assert trains_classifier(own, HEAD)
    assert not trains_classifier(own, {})  # it has a head, which the client did not train
    assert not trains_classifier(own, {name: torch.zeros_like(tensor) for name, tensor in HEAD.items()})
    assert not trains_classifier(adapt(random_model(transformers.BertForMaskedLM, bert_config())), HEAD)
    assert not trains_classifier(tiny_gpt2, {"score.weight": torch.ones(1, 64)})  # tied: no head among its parameters


# Checked once


def test_numbers_are_checked_once(tiny_gpt2, monkeypatch):
    """Moving or narrowing evidence does not look at all entries again (135 million of SmolLM2)."""
    evidence = GradientEvidence.of(tiny_gpt2, gradients_of(tiny_gpt2), num_texts=2)

    def fail(*_):
        raise AssertionError("checked again")

    monkeypatch.setattr("unmask.evidence.gradients.require_floats", fail)
    assert evidence.to("cpu").num_texts == evidence.only("h.0.").num_texts == 2
    assert evidence.to("cpu").gradients.keys() == evidence.gradients.keys()


def test_gradients_that_are_all_none_are_not_there_yet(tiny_gpt2):
    nothing = dict.fromkeys(gradients_of(tiny_gpt2))
    with pytest.raises(EvidenceError, match=r"all gradients are None; call backward\(\) first"):
        GradientEvidence.of(tiny_gpt2, nothing)
