"""Gradient evidence: any part of an update, under transformers' names, of the model it was made with."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors import safe_open
from tests.tiny_models import gpt2_config, random_model
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence import GradientEvidence, Task, Update, load_evidence
from unmask.models import Model, Role, adapt


def random_update(model: Model, *patterns: str, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of the shapes of the model's parameters, under transformers' own names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.hf.named_parameters()
        if not patterns or any(pattern in name for pattern in patterns)
    }


# Wrapping what was captured elsewhere


def test_names_of_transformers_become_canonical(tiny):
    update = random_update(tiny)
    evidence = GradientEvidence.of(tiny, update)
    assert set(evidence.gradients) == {name for name, _ in tiny.named_parameters()}
    for name, tensor in update.items():
        assert torch.equal(evidence.gradients[tiny.canonical_name(name)], tensor)


def test_side_knowledge_is_unknown_unless_stated(tiny_gpt2):
    silent = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2))
    assert (silent.task, silent.num_texts, silent.update) == (None, None, Update.GRADIENT)
    told = GradientEvidence.of(
        tiny_gpt2, random_update(tiny_gpt2), task=Task.CLASSIFICATION, num_texts=3, update=Update.DELTA
    )
    assert (told.task, told.num_texts, told.update) == (Task.CLASSIFICATION, 3, Update.DELTA)


def test_a_partial_update_is_legal(tiny):
    """Any subset of the parameters: one block, one layer, biases alone."""
    for pattern in ("0.", "weight", "norm" if tiny.family in ("llama", "qwen2", "mistral") else "bias"):
        update = random_update(tiny, pattern)
        assert len(GradientEvidence.of(tiny, update).gradients) == len(update) > 0


def test_unknown_names_beside_known_ones_are_legal(tiny_gpt2):
    """A client's own head is not in the server's model."""
    update = random_update(tiny_gpt2, "h.0.") | {"my_head.weight": torch.ones(2, 64)}
    assert "my_head.weight" in GradientEvidence.of(tiny_gpt2, update).gradients


@pytest.mark.parametrize("update", [{}, {"fc1.weight": torch.ones(3)}])
def test_unknown_names_alone_are_refused(tiny_gpt2, update):
    first = next(iter(update), "none")
    with pytest.raises(EvidenceError, match=rf"none of the {len(update)} tensors.*'{first}'.*named_parameters"):
        GradientEvidence.of(tiny_gpt2, update)


@pytest.mark.parametrize("reshape", [Tensor.flatten, lambda g: g[:10], lambda g: g[None]])
def test_a_wrong_shape_is_refused_by_name(tiny_gpt2, reshape):
    update = random_update(tiny_gpt2, "h.0.attn.c_proj.weight")
    bad = {name: reshape(tensor) for name, tensor in update.items()}
    with pytest.raises(EvidenceError, match=r"'h\.0\.attn\.c_proj\.weight' has shape .* parameter has \(64, 64\)"):
        GradientEvidence.of(tiny_gpt2, bad)


def test_a_transposed_gradient_is_refused(tiny_llama):
    update = random_update(tiny_llama, "layers.0.mlp.up_proj")
    with pytest.raises(EvidenceError, match=r"\(64, 96\), the parameter has \(96, 64\)"):
        GradientEvidence.of(tiny_llama, {name: tensor.T for name, tensor in update.items()})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused(tiny_gpt2, bad):
    update = random_update(tiny_gpt2, "h.0.")
    update["transformer.h.0.mlp.c_fc.bias"][5] = bad
    with pytest.raises(EvidenceError, match=r"'h\.0\.mlp\.c_fc\.bias' holds 1 of 256 values that are NaN or Inf"):
        GradientEvidence.of(tiny_gpt2, update)


def test_nan_is_refused_in_other_tensors_too(tiny_gpt2):
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."))
    with pytest.raises(EvidenceError, match="NaN"):
        evidence.with_tensors({name: tensor / 0 * 0 for name, tensor in evidence.gradients.items()})


def test_numbers_whose_squares_vanish_are_refused(tiny_gpt2):
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."))
    evidence.check(tiny_gpt2)
    small = evidence.with_tensors({name: 1e-25 * tensor for name, tensor in evidence.gradients.items()})
    with pytest.raises(EvidenceError, match="multiply all tensors by one factor"):
        small.check(tiny_gpt2)


# Another model


def test_evidence_of_another_model_is_refused(tiny_gpt2):
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2))
    evidence.check(tiny_gpt2)
    other = adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config(), seed=1))
    with pytest.raises(EvidenceError) as error:
        evidence.check(other)
    assert tiny_gpt2.fingerprint()[:12] in str(error.value)
    assert other.fingerprint()[:12] in str(error.value)
    assert "the same checkpoint" in str(error.value)


def test_evidence_of_another_round_is_refused(tiny_gpt2):
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2))
    later = tiny_gpt2.to()
    for parameter in later.hf.parameters():
        parameter.data *= 1.02  # beyond bfloat16's half unit of 0.4 %, in which fingerprints are taken
    with pytest.raises(EvidenceError, match="the same round"):
        evidence.check(later)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_same_model_in_another_precision_is_accepted(tiny, dtype):
    GradientEvidence.of(tiny, random_update(tiny)).check(tiny.to(dtype=dtype))


def test_evidence_of_a_classifier_fits_the_language_model_of_the_same_body(tiny_gpt2):
    classifier = adapt(transformers.GPT2ForSequenceClassification(gpt2_config()))
    classifier.body.load_state_dict(tiny_gpt2.body.state_dict())
    evidence = GradientEvidence.of(classifier, random_update(classifier))
    evidence.check(tiny_gpt2)
    assert "score.weight" in evidence.gradients


# Linear layers of an update


def test_a_linear_layers_gradient_lies_as_its_weight(tiny):
    update = random_update(tiny)
    evidence = GradientEvidence.of(tiny, update)
    for role in Role:
        for block in range(tiny.num_blocks):
            gradient, weight = evidence.linear(tiny, role, block), tiny.weight(role, block)
            if weight is None:
                assert gradient is None
            else:
                assert gradient.shape == weight.shape
                layer = tiny.linear(role, block)
                assert torch.equal(gradient, layer.orient(evidence.gradients[layer.parameter]))


def test_a_layer_that_the_update_lacks_is_none(tiny):
    evidence = GradientEvidence.of(tiny, random_update(tiny, tiny.linear(Role.QUERY, 0).parameter))
    assert evidence.linear(tiny, Role.QUERY, 0) is not None
    assert evidence.linear(tiny, Role.QUERY, 1) is None
    assert evidence.linear(tiny, Role.MLP_IN, 0) is None


def test_a_layer_whose_gradient_is_zero_is_none(tiny_gpt2):
    """Frozen layers are often sent as zeros. GPT-2 keeps three layers in one parameter; each is told by itself."""
    update = random_update(tiny_gpt2, "h.0.attn.c_attn.weight")
    update["transformer.h.0.attn.c_attn.weight"][:, :64] = 0
    evidence = GradientEvidence.of(tiny_gpt2, update)
    assert evidence.linear(tiny_gpt2, Role.QUERY, 0) is None
    assert evidence.linear(tiny_gpt2, Role.KEY, 0) is not None


# Parts and copies


def test_only_keeps_what_matches(tiny_gpt2):
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2), num_texts=3)
    part = evidence.only("h.0.attn", "wte")
    assert set(part.gradients) == {name for name in evidence.gradients if "h.0.attn" in name or "wte" in name}
    assert part.num_texts == 3
    assert len(evidence.gradients) > len(part.gradients) > 0
    part.check(tiny_gpt2)
    assert evidence.only("nothing").gradients == {}


def test_to_keeps_everything(tiny_gpt2):
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2), num_texts=3, task=Task.NEXT_TOKEN)
    moved = evidence.to("cpu")
    assert dataclasses.replace(moved, gradients={}) == dataclasses.replace(evidence, gradients={})
    assert all(torch.equal(moved.gradients[name], tensor) for name, tensor in evidence.gradients.items())


def test_evidence_is_frozen(tiny_gpt2):
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        evidence.num_texts = 3


# On disk


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_round_trip(tiny, tmp_path, dtype):
    update = {name: tensor.to(dtype) for name, tensor in random_update(tiny).items()}
    before = GradientEvidence.of(
        tiny, update, task=Task.CLASSIFICATION, num_texts=2, update=Update.DELTA, compute_dtype=dtype
    )
    after = load_evidence(before.save(tmp_path / "update.safetensors"))
    assert dataclasses.replace(after, gradients={}) == dataclasses.replace(before, gradients={})
    assert set(after.gradients) == set(before.gradients)
    assert all(torch.equal(after.gradients[name], tensor) for name, tensor in before.gradients.items())
    assert all(tensor.dtype == dtype for tensor in after.gradients.values())
    after.check(tiny)


def test_a_partial_update_comes_back_partial(tiny_gpt2, tmp_path):
    before = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.1.mlp"))
    after = load_evidence(before.save(tmp_path / "update.safetensors"))
    assert set(after.gradients) == set(before.gradients)
    assert (after.task, after.num_texts) == (None, None)


def test_a_task_may_be_given_by_its_name(tiny_gpt2, tmp_path):
    """As in `observe_gradients(task="classification")`; kept as text, it could not be saved later."""
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2), task="classification")
    assert evidence.task is Task.CLASSIFICATION
    assert load_evidence(evidence.save(tmp_path / "update.safetensors")).task is Task.CLASSIFICATION


# What the adversary knows of local training and of noise


KNOWN = {"learning_rate": 0.01, "num_steps": 4, "optimizer": "adamw", "weight_decay": 0.0, "noise_std": 1e-4}


def test_what_is_known_is_kept(tiny_gpt2, tmp_path):
    before = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."), **KNOWN)
    loaded = load_evidence(before.save(tmp_path / "update.safetensors"))
    for evidence in (before, before.to("cpu"), before.only("h.0.attn"), loaded):
        assert {name: getattr(evidence, name) for name in KNOWN} == KNOWN


def test_what_is_not_known_is_none(tiny_gpt2, tmp_path):
    """In memory, and in files of the time before these keys, which are the same as files without them."""
    before = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."))
    path = before.save(tmp_path / "update.safetensors")
    with safe_open(path, framework="pt") as file:
        assert not set(KNOWN) & set(json.loads(file.metadata()["unmask"]))
    for evidence in (before, load_evidence(path)):
        assert all(getattr(evidence, name) is None for name in KNOWN)
        assert evidence.adapters == {}


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0, or None, got 0.0"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number above 0"),
        ({"learning_rate": "0.01"}, "learning_rate must be a finite number above 0"),
        ({"learning_rate": True}, "learning_rate must be a finite number above 0"),
        ({"num_steps": 0}, "num_steps must be a whole number from 1 on"),
        ({"num_steps": 1.5}, "num_steps must be a whole number from 1 on"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adamw, or None, got 'lion'"),
        ({"weight_decay": -0.01}, "weight_decay must be a finite number of 0 or more"),
        ({"noise_std": float("nan")}, "noise_std must be a finite number of 0 or more"),
    ],
)
def test_what_cannot_be_is_refused(tiny_gpt2, known, message):
    with pytest.raises(EvidenceError, match=message):
        GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."), **known)


def test_a_masked_token_task_survives_the_file(tiny_bert, tmp_path):
    evidence = GradientEvidence.of(tiny_bert, random_update(tiny_bert, "layer.0."), task="masked_token")
    assert load_evidence(evidence.save(tmp_path / "update.safetensors")).task is Task.MASKED_TOKEN


def test_float8_is_read_as_float32(tiny_gpt2, tmp_path):
    update = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in random_update(tiny_gpt2, "h.0.").items()}
    evidence = GradientEvidence.of(tiny_gpt2, update)
    coarse = {name: update[f"transformer.{name}"] for name in evidence.gradients}
    for found in (evidence, evidence.with_tensors(coarse), load_evidence(evidence.save(tmp_path / "u.safetensors"))):
        for name, tensor in found.gradients.items():
            assert torch.equal(tensor, coarse[name].float())


def test_sparse_tensors_that_were_captured_become_dense(tiny_gpt2):
    update = random_update(tiny_gpt2, "wte")
    for stored in (Tensor.to_sparse, Tensor.to_sparse_csr):
        evidence = GradientEvidence.of(tiny_gpt2, {name: stored(tensor) for name, tensor in update.items()})
        assert torch.equal(evidence.gradients["wte.weight"], update["transformer.wte.weight"])


def test_scales_of_adapters_by_module(tiny_gpt2, tmp_path):
    scales = {"base_model.model.transformer.h.0.attn.c_attn": 2.0, "h.1.attn.c_attn": 0.5}
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."), adapter_scale=scales)
    expected = {"h.0.attn.c_attn": 2.0, "h.1.attn.c_attn": 0.5}
    assert evidence.adapter_scale == load_evidence(evidence.save(tmp_path / "u.safetensors")).adapter_scale == expected
    with pytest.raises(EvidenceError, match="adapter_scale must be a finite number above 0"):
        GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."), adapter_scale={"h.0.attn.c_attn": -1.0})


def test_adapters_are_copies(tiny_gpt2):
    """A model that is trained on may own them."""
    name = "h.0.attn.c_attn.lora_A.weight"
    factor = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    evidence = GradientEvidence.of(tiny_gpt2, random_update(tiny_gpt2, "h.0."), adapters={name: factor})
    before = factor.clone()
    factor += 1
    assert torch.equal(evidence.adapters[name], before)


def test_a_second_change_of_a_young_adapter_is_no_weight(tiny_llama):
    """B is zero before the first round: what the first round made of it is parallel to what the second one adds."""
    module = "model.layers.0.self_attn.q_proj"
    down, up = torch.randn(8, 64), torch.randn(64, 8)
    adapters = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    change = {f"{module}.lora_A.weight": 1e-3 * torch.randn(8, 64), f"{module}.lora_B.weight": 1.01 * up}
    evidence = GradientEvidence.of(tiny_llama, change, adapters=adapters, update="delta")
    assert set(evidence.gradients) == set(evidence.adapters)
    with pytest.raises(EvidenceError, match="the model's weights, not gradients"):
        GradientEvidence.of(tiny_llama, {**change, f"{module}.lora_A.weight": 1.01 * down}, adapters=adapters)
