"""States from rows of logits: what the output layer maps back, and what is refused."""

from __future__ import annotations

import pytest
import torch

from unmask.errors import EvidenceError, UnmaskError
from unmask.evidence.next_token import vectors_of_logits
from unmask.models.pooling import Pooling
from unmask.protocols.next_token import next_token_logits
from unmask.protocols.vectors import observe_vectors

TEXTS = [[5, 17, 99], [400, 3], [8]]
ROUNDING = 1e-5  # of a state's length; float32 logits


@pytest.mark.parametrize("log_probabilities", [False, True])
def test_a_row_gives_the_last_state(tiny_llama, tiny_gpt2, log_probabilities):
    for model in (tiny_llama, tiny_gpt2):
        rows = next_token_logits(model, TEXTS)
        found = vectors_of_logits(model, rows.log_softmax(1) if log_probabilities else rows)
        states = observe_vectors(model, TEXTS, pooling="last", normalise=False).vectors
        assert found.recipe.pooling is Pooling.LAST
        assert not found.recipe.normalise
        assert float(((found.vectors - states).norm(dim=1) / states.norm(dim=1)).max()) < ROUNDING


def test_one_row_by_itself(tiny_llama):
    assert vectors_of_logits(tiny_llama, next_token_logits(tiny_llama, TEXTS)[0].numpy()).vectors.shape == (1, 64)


def test_rows_of_few_tokens_are_refused(tiny_llama):
    with pytest.raises(EvidenceError, match="one number for each of the 500 tokens"):
        vectors_of_logits(tiny_llama, torch.zeros(1, 20))


def test_noise_is_refused(tiny_llama):
    rows = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    with pytest.raises(EvidenceError, match="cannot come from this output layer"):
        vectors_of_logits(tiny_llama, rows)
    rows[0, 3] = -torch.inf
    with pytest.raises(EvidenceError, match="masked"):
        vectors_of_logits(tiny_llama, rows)


def test_encoders_have_no_next_token(tiny_bert):
    with pytest.raises(UnmaskError, match="no output layer"):
        vectors_of_logits(tiny_bert, torch.zeros(1, 500))
