"""Weights that stay on the disk: what is given back is read again, and is the same."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers

from unmask.models import load_model
from unmask.models.mapped import free_bytes, is_released, release, release_blocks, release_weight

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")


@pytest.fixture
def folder(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def test_the_limit_is_what_is_told_where_it_is_less(monkeypatch):
    free = free_bytes()
    assert free > 10**6
    monkeypatch.setenv("UNMASK_MEMORY_GB", "0.5")
    assert free_bytes() == min(5 * 10**8, free_bytes())
    monkeypatch.setenv("UNMASK_MEMORY_GB", "1e9")
    assert free_bytes() < 10**18


@needs_linux
def test_blocks_are_given_back_where_they_would_fill_the_memory(folder, monkeypatch):
    tokens = torch.tensor([[5, 17, 40, 2]])
    before = load(folder)(tokens).logits
    small = load(folder)
    assert not release_blocks(small)  # there is memory enough
    assert not is_released(small.model.layers[0])
    monkeypatch.setenv("UNMASK_MEMORY_GB", "0.0001")
    hf = load(folder)
    assert release_blocks(hf)
    assert all(is_released(block) for block in hf.model.layers)
    assert torch.equal(hf(tokens).logits, before)
    assert torch.equal(hf(tokens).logits, before)


@needs_linux
def test_a_weight_that_was_changed_is_not_lost(folder, monkeypatch):
    monkeypatch.setenv("UNMASK_MEMORY_GB", "0.0001")
    hf = load(folder)
    release_blocks(hf)
    block = hf.model.layers[1]
    with torch.no_grad():
        block.mlp.down_proj.weight.mul_(2)
    changed = block.mlp.down_proj.weight.clone()
    release(block)
    release_weight(block.mlp.down_proj.weight)
    assert torch.equal(block.mlp.down_proj.weight, changed)


def test_models_in_memory_are_left_alone(tiny_llama, monkeypatch):
    monkeypatch.setenv("UNMASK_MEMORY_GB", "0.0001")
    assert not release_blocks(tiny_llama.hf) or sys.platform == "linux"
    assert not any(is_released(tiny_llama.block_module(block)) for block in range(tiny_llama.num_blocks))


@needs_linux
def test_a_model_is_the_same_with_and_without():
    model = load_model("minilm-l6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNMASK_MEMORY_GB", "0.001")
        again = load_model("minilm-l6")
    assert any(is_released(again.block_module(block)) for block in range(again.num_blocks))
    tokens = torch.tensor([[101, 2023, 2003, 102]])
    for one, other in zip(model.hidden_states(tokens), again.hidden_states(tokens), strict=True):
        assert torch.equal(one, other)
    assert again.fingerprint() == model.fingerprint()
