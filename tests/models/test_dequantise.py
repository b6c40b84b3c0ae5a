"""A quantised model is read as the plain one that it computes with."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.models.families import build
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import unmask
from unmask.models import adapt
from unmask.models.dequantise import dequantise, is_quantised

pytest.importorskip("bitsandbytes")
TEXTS = [(11, 12, 13, 14, 15), (21, 22, 23), (31, 32, 33, 34, 35, 36), (41, 42)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("llama")
    build("Llama").save_pretrained(where)
    return where


def load(folder, **settings):
    options = BitsAndBytesConfig(**settings)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, device_map="cpu").eval()


@pytest.fixture
def four_bits(folder):
    return load(folder, load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_type="nf4")


def test_a_plain_model_is_taken_as_it_is():
    hf = build("Llama")
    assert dequantise(hf) is hf
    assert not any(is_quantised(module) for module in hf.modules())
    assert not is_quantised(nn.Embedding(3, 2))


def test_four_bits_give_the_same_logits_and_stay_as_they_are(four_bits):
    """As in training: without gradients bitsandbytes rounds to bfloat16 on some CPUs."""
    layer = four_bits.model.layers[0].self_attn.q_proj
    assert is_quantised(layer)
    tokens, codes = torch.tensor([[11, 12, 13]]), layer.weight.data.clone()
    model = adapt(four_bits)
    assert not any(is_quantised(module) for module in model.hf.modules())
    assert four_bits.model.layers[0].self_attn.q_proj is layer
    assert torch.equal(layer.weight.data, codes)
    assert torch.allclose(model.hf(input_ids=tokens).logits, four_bits(input_ids=tokens).logits, atol=1e-5)
    assert four_bits.is_quantized
    assert model.to(dtype=torch.float64).dtype is torch.float64


def test_eight_bits_are_read_to_what_they_round(folder):
    hf = load(folder, load_in_8bit=True)
    model, first = adapt(hf), build("Llama")
    assert not model.problem
    read, true = model.weight(unmask.models.Role.QUERY, 0), first.model.layers[0].self_attn.q_proj.weight.T
    assert float((read - true).norm() / true.norm()) < 1e-2


def test_texts_from_the_gradients_of_a_model_with_four_bits(four_bits):
    model = adapt(four_bits)
    recovery = unmask.recover_text(unmask.observe_gradients(model, TEXTS), model)
    assert recovery.status is unmask.Status.RECOVERED, recovery.reason
    assert Counter(text.tokens for text in recovery.value.texts) == Counter(TEXTS)


def test_adapters_beside_four_bits(four_bits):
    tuned = get_peft_model(four_bits, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model = adapt(tuned)
    assert model.adapters is not None
    assert not any(is_quantised(module) for module in model.hf.modules())
    assert any(is_quantised(module) for module in tuned.modules())
