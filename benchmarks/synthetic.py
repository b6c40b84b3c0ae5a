"""Batches and models that need no download: Zipf-distributed tokens, true shapes with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from unmask.models import Model, adapt


def zipf_batch(
    num_texts: int, min_tokens: int, max_tokens: int, vocab_size: int, *, seed: int, first: int | None = None
) -> list[list[int]]:
    """Texts of Zipf-distributed tokens over a shuffled vocabulary; `first` (a BOS token) is put in front of each."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(vocab_size - 10, generator=generator) + 10
    weights = 1.0 / torch.arange(1, len(shuffled) + 1)
    start = [] if first is None else [first]
    texts = []
    for _ in range(num_texts):
        length = int(torch.randint(min_tokens, max_tokens + 1, (1,), generator=generator)) - len(start)
        drawn = torch.multinomial(weights, length, replacement=True, generator=generator)
        texts.append(start + shuffled[drawn].tolist())
    return texts


def gpt2_shape(num_blocks: int = 12, *, seed: int = 0, **changes: int) -> Model:
    """GPT-2 at its true shape with random weights."""
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=num_blocks, loss_type="ForCausalLM", **changes)
    return adapt(GPT2LMHeadModel(config).eval())


def bert_shape(num_blocks: int = 12, *, tokenizer: Any = None, seed: int = 0, **changes: int) -> Model:
    """BERT-base at its true shape (12 heads, width 768, 30,522 tokens) with random weights."""
    torch.manual_seed(seed)
    return adapt(BertModel(BertConfig(num_hidden_layers=num_blocks, **changes)).eval(), tokenizer)


def llama_2_7b_shape(num_blocks: int = 2, *, seed: int = 0, device: str = "cpu") -> Model:
    """Llama-2-7B's width, heads and vocabulary with random weights; few blocks, as the attack reads first and last."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=num_blocks,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    with torch.device(device):
        hf = LlamaForCausalLM(config)
    return adapt(hf.eval())
