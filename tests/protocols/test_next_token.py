"""Rows of logits as a service shows them, the last token's of each prompt."""

from __future__ import annotations

import pytest
import torch

from unmask.errors import InputError
from unmask.protocols import observe_next_token
from unmask.protocols.next_token import next_token_logits

TEXTS = [[5, 17, 99], [400, 3]]


def test_padding_changes_nothing(tiny_llama):
    together = next_token_logits(tiny_llama, TEXTS)
    for text, row in zip(TEXTS, together, strict=True):
        alone = tiny_llama.hf(input_ids=torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-4)


def test_logits_and_log_probabilities_tell_the_same(tiny_llama):
    one, other = (observe_next_token(tiny_llama, TEXTS, log_probabilities=flag) for flag in (False, True))
    torch.testing.assert_close(one.vectors, other.vectors, rtol=1e-3, atol=1e-4)


def test_an_empty_batch_is_refused(tiny_llama):
    with pytest.raises(InputError, match="empty"):
        observe_next_token(tiny_llama, [])
