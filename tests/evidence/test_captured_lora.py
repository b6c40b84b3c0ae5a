"""LoRA factors in an update: PEFT's names, the layers that they sit on, shapes and ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from unmask.errors import EvidenceError
from unmask.evidence import GradientEvidence, load_evidence
from unmask.evidence.captured import linear_sizes, plain_name
from unmask.models import Role

QUERY = "layers.0.self_attn.q_proj"


def factors(module: str, d_in: int, d_out: int, rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{module}.lora_A.weight": torch.randn(rank, d_in, generator=generator),
        f"{module}.lora_B.weight": torch.randn(d_out, rank, generator=generator),
    }


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.model.layers.0.q.lora_A.default.weight", "model.layers.0.q.lora_A.weight"),
        ("base_model.model.model.layers.0.q.lora_B.weight", "model.layers.0.q.lora_B.weight"),
        ("layers.0.q.lora_A.client7.weight", "layers.0.q.lora_A.weight"),
        ("layers.0.q.lora_A.weight", "layers.0.q.lora_A.weight"),
        ("base_model.model.classifier.weight", "classifier.weight"),
        ("base_model.model.score.modules_to_save.default.weight", "score.weight"),
        ("base_model.model.model.layers.0.q.base_layer.weight", "model.layers.0.q.weight"),
        ("model.layers.0.q.weight", "model.layers.0.q.weight"),
    ],
)
def test_names_without_what_peft_puts_around_them(name, plain):
    assert plain_name(name) == plain


def test_every_linear_layer_has_its_sizes(tiny):
    sizes = linear_sizes(tiny)
    for role in Role:
        for block in range(tiny.num_blocks):
            layer = tiny.linear(role, block)
            if layer is not None:
                whole = dataclasses.replace(layer, columns=None).orient(tiny.parameter(layer.parameter))
                assert sizes[layer.parameter.removesuffix(".weight")] == tuple(whole.shape)
    assert not any("embed" in name or name in ("wte", "wpe") for name in sizes)


def test_factors_of_every_family_are_accepted(tiny):
    layer = tiny.linear(Role.MLP_IN, 1)
    module = layer.parameter.removesuffix(".weight")
    d_in, d_out = tiny.weight(Role.MLP_IN, 1).shape
    assert d_in != d_out
    evidence = GradientEvidence.of(tiny, factors(module, d_in, d_out), adapters=factors(module, d_in, d_out, seed=1))
    assert set(evidence.gradients) == set(evidence.adapters) == set(factors(module, d_in, d_out))
    with pytest.raises(EvidenceError, match=r"has shape .*, expected"):
        GradientEvidence.of(tiny, factors(module, d_out, d_in))


def test_an_update_as_peft_saves_it_is_accepted(tiny_llama):
    named = {f"base_model.model.model.{name}": tensor for name, tensor in factors(QUERY, 64, 64).items()}
    evidence = GradientEvidence.of(tiny_llama, named, adapters=factors(QUERY, 64, 64, seed=1))
    assert set(evidence.gradients) == set(evidence.adapters) == set(factors(QUERY, 64, 64))


@pytest.mark.parametrize("module", ["layers.9.self_attn.q_proj", "embed_tokens", "layers.0.input_layernorm", "fc1"])
def test_factors_of_what_is_no_linear_layer_are_refused(tiny_llama, module):
    with pytest.raises(EvidenceError, match=rf"no linear layer '{module}'"):
        GradientEvidence.of(tiny_llama, factors(module, 64, 64))


def test_ranks_must_agree(tiny_llama):
    mixed = factors(QUERY, 64, 64, rank=4) | {f"{QUERY}.lora_B.weight": torch.ones(64, 5)}
    with pytest.raises(EvidenceError, match=rf"'{QUERY}' have ranks 4 and 5"):
        GradientEvidence.of(tiny_llama, mixed)
    with pytest.raises(EvidenceError, match="have ranks 4 and 3"):
        GradientEvidence.of(tiny_llama, factors(QUERY, 64, 64), adapters=factors(QUERY, 64, 64, rank=3))


@pytest.mark.parametrize("shape", [(64,), (4, 63), (4, 64, 1)])
def test_a_factor_of_another_shape_is_refused(tiny_llama, shape):
    with pytest.raises(EvidenceError, match=r"lora_A.weight' has shape .* expected \(rank, 64\)"):
        GradientEvidence.of(tiny_llama, {f"{QUERY}.lora_A.weight": torch.ones(shape)})


def test_adapters_that_are_no_factors_are_refused(tiny_llama):
    with pytest.raises(EvidenceError, match=r"the adapters hold 'embed_tokens\.weight'"):
        GradientEvidence.of(tiny_llama, factors(QUERY, 64, 64), adapters={"embed_tokens.weight": torch.ones(500, 64)})


def test_adapters_that_are_not_finite_are_refused(tiny_llama):
    bad = factors(QUERY, 64, 64)
    bad[f"{QUERY}.lora_A.weight"][0, 0] = float("nan")
    with pytest.raises(EvidenceError, match="NaN or Inf"):
        GradientEvidence.of(tiny_llama, factors(QUERY, 64, 64), adapters=bad)


def test_adapters_come_back_from_disk_apart_from_the_gradients(tiny_llama, tmp_path):
    gradients, adapters = factors(QUERY, 64, 64), factors(QUERY, 64, 64, seed=1)
    before = GradientEvidence.of(tiny_llama, gradients, adapters=adapters)
    after = load_evidence(before.save(tmp_path / "update.safetensors"))
    for name in gradients:
        assert torch.equal(after.gradients[name], gradients[name])
        assert torch.equal(after.adapters[name], adapters[name])
    after.check(tiny_llama)
    assert set(after.to("cpu").adapters) == set(adapters)
    assert set(after.only("lora_B").adapters) == set(adapters)
