"""What models are run on when they are asked."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.models.families import build

from unmask.errors import UnsupportedModelError
from unmask.models.inputs import no_cache, short_texts, usual_tokens


def test_usual_tokens_are_neither_special_nor_alike():
    tokens = usual_tokens(build("Llama"), 40)
    assert len(set(tokens.tolist())) == 40
    assert not {0, 1, 2} & set(tokens.tolist())  # padding, start and end
    assert torch.equal(tokens, usual_tokens(build("Llama"), 40))


def test_a_small_vocabulary_repeats_itself():
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=10, n_embd=32, n_layer=1, n_head=2))
    assert len(usual_tokens(hf, 25)) == 25


def test_a_model_without_a_token_embedding_is_refused():
    hf = transformers.ViTModel(transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    hf.get_input_embeddings = lambda: None
    with pytest.raises(UnsupportedModelError, match="ViTModel has no token embedding"):
        short_texts(hf, 2, 7)


@pytest.mark.parametrize(("name", "option"), [("Llama", {"use_cache": False}), ("DistilBert", {})])
def test_a_cache_is_switched_off_where_there_is_one(name, option):
    assert no_cache(build(name)) == option
