"""The Llama family: its variants beside transformers' own forward pass, rotary positions, sliding windows."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.models.parity import FLOAT32_PARITY, FLOAT64_PARITY, precise, random_batch, worst_error
from tests.tiny_models import llama_sizes, random_model

from unmask.errors import InputError
from unmask.models import adapt


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 32},
        {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
)
def test_parity_of_llamas_variants(changes):
    config = transformers.LlamaConfig(**llama_sizes(**changes))
    model = precise(adapt(random_model(transformers.LlamaForCausalLM, config)))
    assert worst_error(model, *random_batch(model, "right")) < FLOAT64_PARITY


@pytest.mark.parametrize("window", [5, 9])
def test_a_text_may_be_longer_than_the_sliding_window(window):
    """Mistral 7B v0.1 has a window of 4096; small ones show the same, whether or not asking the model shows them."""
    config = transformers.MistralConfig(**llama_sizes(sliding_window=window))
    model = precise(adapt(random_model(transformers.MistralForCausalLM, config)))
    assert worst_error(model, *random_batch(model, "right")) < FLOAT64_PARITY


def test_a_text_longer_than_the_model_takes_is_refused(tiny_llama):
    tokens = torch.zeros(1, tiny_llama.max_positions + 1, dtype=torch.long)
    with pytest.raises(InputError, match=f"{tokens.shape[1]} tokens, this model takes {tiny_llama.max_positions}"):
        tiny_llama.hidden_states(tokens)


def test_rotated_scores_depend_on_distances_only(tiny_llama, tiny_mistral):
    """q·k of two tokens is the same wherever they stand, as long as they are as far apart."""
    for model in (precise(tiny_llama), precise(tiny_mistral)):
        rows = model.first_input(torch.tensor([5, 17]), torch.tensor([0, 0]))

        def score(first: int, second: int, model=model, rows=rows) -> torch.Tensor:
            queries, keys, _ = model.queries_keys_values(0, rows, torch.tensor([first, second]))
            return queries[0, 0] @ keys[1, 0]

        assert torch.allclose(score(0, 3), score(20, 23), rtol=FLOAT32_PARITY)  # angles are computed in float32
        assert not torch.allclose(score(0, 3), score(0, 4), rtol=1e-3)
