"""Small random models of every family, real weights where they are installed, and the path to `tests.reference`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import unmask
from unmask.errors import UnknownModelError
from unmask.models import Model, adapt

# `from tests.reference… import …` works however pytest was started.
_ROOT = str(Path(__file__).parents[1])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

VOCAB, WIDTH, NUM_BLOCKS, NUM_HEADS, NUM_POSITIONS = 500, 64, 3, 4, 64


def shaken(hf: Any, seed: int = 0) -> Any:
    """The model with noise on every parameter, so that biases are not zero and attention is not uniform.

    Noise of 0.8/√d gives projections of order 1 whatever the width.
    """
    generator = torch.Generator().manual_seed(seed)
    size = 0.8 / hf.config.hidden_size**0.5
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return hf.eval()


def gpt2_config(**changes: Any) -> transformers.GPT2Config:
    sizes = {"n_embd": WIDTH, "n_layer": NUM_BLOCKS, "n_head": NUM_HEADS, "n_positions": NUM_POSITIONS}
    tokens = {"bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 1}
    return transformers.GPT2Config(**({"vocab_size": VOCAB} | sizes | tokens | changes))


def llama_sizes(**changes: Any) -> dict[str, Any]:
    """Sizes under the names that Llama, Mistral and Qwen2 share; two query heads on each key/value head."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2,
        "intermediate_size": 96,
        "max_position_embeddings": NUM_POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return sizes | changes


def bert_config(**changes: Any) -> transformers.BertConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": NUM_HEADS,
        "intermediate_size": 96,
        "max_position_embeddings": NUM_POSITIONS,
        "pad_token_id": 0,
    }
    return transformers.BertConfig(**(sizes | changes))


# Tests share these models: whoever changes a weight or a mode does it on a copy (`model.to()`).


@pytest.fixture(scope="session")
def tiny_gpt2() -> Model:
    return adapt(shaken(transformers.GPT2LMHeadModel(gpt2_config())))


@pytest.fixture(scope="session")
def tiny_llama() -> Model:
    """Grouped-query attention, an output layer of its own."""
    return adapt(shaken(transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_sizes()))))


@pytest.fixture(scope="session")
def tiny_qwen2() -> Model:
    """As Llama, with biases on queries, keys and values, and a tied output layer."""
    config = transformers.Qwen2Config(**llama_sizes(tie_word_embeddings=True))
    return adapt(shaken(transformers.Qwen2ForCausalLM(config)))


@pytest.fixture(scope="session")
def tiny_mistral() -> Model:
    """As Llama, with heads that are wider than d/h and a sliding window that no test text fills."""
    config = transformers.MistralConfig(**llama_sizes(head_dim=24, sliding_window=NUM_POSITIONS))
    return adapt(shaken(transformers.MistralForCausalLM(config)))


@pytest.fixture(scope="session")
def tiny_bert() -> Model:
    return adapt(shaken(transformers.BertForMaskedLM(bert_config())))


TINY = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral", "tiny_bert")


@pytest.fixture(scope="session", params=TINY)
def tiny(request: pytest.FixtureRequest) -> Model:
    """Each small model in turn."""
    return request.getfixturevalue(request.param)


def _real(name: str) -> Model:
    try:
        return unmask.load_model(name)
    except UnknownModelError as error:  # the message names the package and the command that brings it
        pytest.skip(f"real weights are missing: {error}")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M; converted once into the cache of the machine."""
    return _real("smollm2-135m")


@pytest.fixture(scope="session")
def minilm() -> Model:
    """MiniLM-L6, a BERT without a language head."""
    return _real("minilm-l6")
