"""Tokens by the length of their rows: where rows stand apart, and where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from tests.tiny_models import gpt2_config, random_model

from unmask import recover_text
from unmask.attacks.gradients.bag_of_words.long_rows import find_long_rows
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]


@pytest.fixture(scope="module")
def wide_vocabulary() -> Model:
    """A tied GPT-2 that gives every one of its many tokens next to no chance."""
    return adapt(random_model(transformers.GPT2LMHeadModel, gpt2_config(vocab_size=20_000)))


def test_tokens_of_the_batch_have_long_rows(wide_vocabulary):
    found = find_long_rows(observe_gradients(wide_vocabulary, TEXTS), wide_vocabulary)
    assert found is not None
    assert found.searched == {token for text in TEXTS for token in text}
    assert sorted(found.by_position) == list(range(5))  # the last token of the longest text is a label only
    assert found.gap.decades > 0.3


def test_without_a_gap_there_is_nothing(wide_vocabulary):
    evidence = observe_gradients(wide_vocabulary, TEXTS)
    name = wide_vocabulary.token_embedding
    noise = torch.randn(evidence.gradients[name].shape, generator=torch.Generator().manual_seed(0))
    noisy = replace(evidence, gradients={**evidence.gradients, name: noise})
    assert find_long_rows(noisy, wide_vocabulary) is None


def test_an_update_without_a_tied_embedding_tells_nothing(wide_vocabulary, tiny_llama):
    evidence = observe_gradients(wide_vocabulary, TEXTS)
    rest = {name: tensor for name, tensor in evidence.gradients.items() if name != wide_vocabulary.token_embedding}
    assert find_long_rows(replace(evidence, gradients=rest), wide_vocabulary) is None
    assert find_long_rows(observe_gradients(tiny_llama, TEXTS), tiny_llama) is None
    assert find_long_rows(observe_gradients(wide_vocabulary, TEXTS, task="classification"), wide_vocabulary) is None


def test_a_next_token_batch_beyond_the_width_is_read_and_confirmed(wide_vocabulary):
    """More pairs of token and position than the width: block 0's span is full, and every token passes it."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(20_000, (40,), generator=generator)
    texts = [words[torch.randint(40, (8,), generator=generator)].tolist() for _ in range(13)]
    found = recover_text(observe_gradients(wide_vocabulary, texts), wide_vocabulary)
    assert found.status is Status.RECOVERED, found.reason
    assert sorted(text.tokens for text in found.value.certain) == sorted(map(tuple, texts))


def test_what_the_replay_refuses_is_dropped(wide_vocabulary):
    """The same rows with another last block: the texts are the same, but the client does not send this."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(20_000, (40,), generator=generator)
    texts = [words[torch.randint(40, (8,), generator=generator)].tolist() for _ in range(13)]
    evidence = observe_gradients(wide_vocabulary, texts)
    changed = {name: 1.1 * g if ".ln_" in name else g for name, g in evidence.gradients.items()}
    found = recover_text(replace(evidence, gradients=changed), wide_vocabulary)
    assert found.status is not Status.RECOVERED
    assert not found.value.certain
