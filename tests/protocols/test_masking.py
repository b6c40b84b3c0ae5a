"""Masked-token training: who is hidden, how, and a loss that is transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import VOCAB, bert_config, random_model, word_tokenizer
from torch import Tensor

from unmask.errors import InputError
from unmask.models import Model, adapt
from unmask.protocols import observe_gradients
from unmask.protocols.batch import Batch, make_batch
from unmask.protocols.masking import mask_tokens, masked_token_loss

PAD, CLS, SEP, MASK = 0, 1, 2, 3
TEXTS = [[CLS, 5, 17, 99, 17, 250, SEP], [CLS, 400, 8, SEP], [CLS, *range(44, 52), SEP]]
# The same products in float64, in another order.
FLOAT64_PARITY = 1e-10


@pytest.fixture(scope="module")
def model(tiny_bert: Model) -> Model:
    """With a masked-language head of its own, and a tokenizer."""
    return adapt(tiny_bert.hf, word_tokenizer())


@pytest.fixture(scope="module")
def headless() -> Model:
    return adapt(random_model(transformers.BertModel, bert_config()), word_tokenizer())


def masked(model: Model, texts: Any, share: float = 0.15, seed: int = 0) -> tuple[Batch, Tensor, Batch]:
    batch = make_batch(model, texts)
    return *mask_tokens(model, batch, share, torch.Generator().manual_seed(seed)), batch


# Who is hidden


def test_the_shares_are_bert_s(model):
    """15 % drawn; of them 80 % become [MASK], 10 % another token, 10 % stay: within four standard deviations."""
    texts = [[CLS, *([7] * 50), SEP]] * 200
    hidden, labels, _ = masked(model, texts)
    drawn = hidden.tokens[labels >= 0]
    assert float((labels[:, 1:-1] >= 0).double().mean()) == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / 10_000) ** 0.5)
    for seen, share in ((drawn == MASK, 0.8), (drawn == 7, 0.1), ((drawn != MASK) & (drawn != 7), 0.1)):
        assert float(seen.double().mean()) == pytest.approx(share, abs=4 * (share * (1 - share) / len(drawn)) ** 0.5)
    assert len(set(drawn[(drawn != MASK) & (drawn != 7)].tolist())) > 50  # of the whole vocabulary


@pytest.mark.parametrize("share", [0.15, 1.0])
def test_labels_are_what_stood_there_and_special_tokens_are_never_drawn(model, share):
    hidden, labels, batch = masked(model, TEXTS, share)
    drawn = labels != -100
    assert torch.equal(labels[drawn], batch.tokens[drawn])
    assert torch.equal(hidden.tokens[~drawn], batch.tokens[~drawn])
    special = (batch.tokens == CLS) | (batch.tokens == SEP) | (batch.tokens == PAD)
    assert not bool((drawn & special).any())
    assert bool(drawn[~special].all()) == (share == 1.0)


def test_the_mask_of_real_tokens_and_types_stay(model):
    hidden, _, batch = masked(model, [([CLS, 7, SEP], [8, 9, SEP]), ([CLS, 5, SEP], [6, SEP])], 1.0)
    assert torch.equal(hidden.mask, batch.mask)
    assert torch.equal(hidden.types, batch.types)


@pytest.mark.parametrize("seed", range(8))
def test_something_is_always_hidden(model, seed):
    _, labels, _ = masked(model, [[CLS, 7, 8, SEP]], 1e-6, seed)
    assert int((labels >= 0).sum()) == 1


def test_masks_follow_the_generator(model):
    first, again, other = (masked(model, TEXTS, 0.5, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0].tokens, again[0].tokens)
    assert not torch.equal(first[1], other[1])


# The loss


@pytest.mark.parametrize("texts", [TEXTS, [([CLS, 7, SEP], [8, 9, SEP]), ([CLS, 5, SEP], [6, SEP])]])
def test_the_loss_is_that_of_transformers(model, texts):
    twin = model.to(dtype=torch.float64)
    hidden, labels, _ = masked(twin, texts, 0.4)
    theirs = twin.hf(**hidden.inputs, labels=labels).loss
    assert masked_token_loss(twin, hidden, labels).item() == pytest.approx(theirs.item(), rel=FLOAT64_PARITY)


def test_gradients_are_those_of_transformers(model):
    twin = model.to(dtype=torch.float64)
    evidence = observe_gradients(twin, TEXTS, task="masked_token", mask_share=0.4, seed=3)
    hidden, labels, _ = masked(twin, TEXTS, 0.4, seed=3)
    twin.hf(**hidden.inputs, labels=labels).loss.backward()
    for name, parameter in twin.named_parameters():
        error = (evidence.gradients[name] - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-9)
        assert float(error) < FLOAT64_PARITY or float(parameter.grad.norm()) < FLOAT64_PARITY


def test_without_a_head_the_token_embeddings_predict(headless):
    hidden, labels, _ = masked(headless, TEXTS, 0.4)
    states = headless.body(**hidden.inputs).last_hidden_state
    scores = (states @ headless.parameter("embeddings.word_embeddings.weight").T).log_softmax(-1)
    expected = -torch.stack([scores[row, place, labels[row, place]] for row, place in (labels >= 0).nonzero()]).mean()
    assert masked_token_loss(headless, hidden, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_every_row_of_a_tied_embedding_moves(headless, model):
    for one in (headless, model):
        moved = observe_gradients(one, TEXTS, task="masked_token").gradients[one.token_embedding]
        assert bool((moved != 0).any(1).all())


# Callers' mistakes


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_out_of_range_is_refused(model, share):
    with pytest.raises(InputError, match="mask_share must lie above 0 and be at most 1"):
        observe_gradients(model, TEXTS, task="masked_token", mask_share=share)


def test_a_model_without_a_mask_token_is_refused(tiny_bert):
    with pytest.raises(InputError, match="needs a tokenizer with a mask token"):
        observe_gradients(tiny_bert, TEXTS, task="masked_token")


def test_texts_of_special_tokens_alone_are_refused(model):
    with pytest.raises(InputError, match="special tokens only"):
        observe_gradients(model, [[CLS, SEP]], task="masked_token")


def test_a_decoder_is_refused(tiny_gpt2):
    decoder = adapt(tiny_gpt2.hf, word_tokenizer())
    with pytest.raises(InputError, match="needs an encoder, and this gpt2 model is not one"):
        observe_gradients(decoder, [[5, VOCAB - 2]], task="masked_token")
