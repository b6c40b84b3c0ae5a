"""Weight decay inside a gradient: told from tokens by rows that are the model's own, taken out, and never a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.wide_models import as_counter, certain

from unmask.attacks.gradients.bag_of_words.attack import BagOfWordsAttack
from unmask.attacks.gradients.decay_in_gradients import without_decay
from unmask.attacks.recover import recover_text
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.evidence.gradients import Update
from unmask.models import Model
from unmask.protocols import observe_gradients
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
WORDS = {token for text in TEXTS for token in text}
DECAYS = (1e-2, 1e-4, 1e-6)


def with_decay(evidence: GradientEvidence, model: Model, decay: float) -> GradientEvidence:
    """The gradient of a loss with an L2 penalty on every weight."""
    decayed = {name: decay * weight.detach() for name, weight in model.named_parameters()}
    sent = {name: evidence.gradients[name] + decayed[name] for name in evidence.gradients}
    return replace(evidence, gradients={**decayed, **sent})


@pytest.fixture(scope="module")
def padded_llama(tiny_llama: Model) -> Model:
    """The row of its padding token is zero, as a fresh embedding has it: nothing moves it, decay neither."""
    model = tiny_llama.to()
    with torch.no_grad():
        model.parameter(model.token_embedding)[0] = 0.0
    return model


@pytest.fixture(scope="module")
def uneven_llama(padded_llama: Model) -> Model:
    """Some rows are ten times longer than others, as in trained models."""
    model = padded_llama.to()
    lengths = torch.randn(model.vocab_size, 1, generator=torch.Generator().manual_seed(0)).exp()
    with torch.no_grad():
        model.parameter(model.token_embedding).mul_(lengths)
    return model


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", ["padded_llama", "tiny_llama", "tiny_gpt2"])
def test_texts_are_read_once_a_proven_decay_is_out(name, decay, request):
    """370 tokens that do not occur used to be certain; GPT-2's positions that no text fills tell a tied model's."""
    model = request.getfixturevalue(name)
    evidence = with_decay(observe_gradients(model, TEXTS), model, decay)
    recovery = recover_text(evidence, model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert certain(recovery) == as_counter(TEXTS)
    assert recovery.value.token_set <= WORDS
    assert f"decay ({decay:.2g} of each weight)" in recovery.reason


@pytest.mark.parametrize("decay", DECAYS)
def test_encoders_are_read_as_well(tiny_bert, decay):
    plain = observe_gradients(tiny_bert, TEXTS, task="classification")
    recovery = BagOfWordsAttack()(with_decay(plain, tiny_bert, decay), tiny_bert)
    assert recovery.value.token_set == WORDS


@pytest.mark.parametrize("name", ["padded_llama", "tiny_gpt2", "tiny_bert"])
def test_without_decay_nothing_is_taken_out(name, request):
    model = request.getfixturevalue(name)
    evidence = observe_gradients(model, TEXTS, task="classification")
    noise = torch.Generator().manual_seed(0)
    noisy = {n: g + 1e-6 * torch.randn(g.shape, generator=noise) for n, g in evidence.gradients.items()}
    for other in (evidence, replace(evidence, gradients=noisy), replace(evidence, update=Update.DELTA)):
        assert without_decay(other, model) == (other, "")


def test_a_decay_that_one_row_contradicts_is_none(tiny_llama):
    evidence = with_decay(observe_gradients(tiny_llama, TEXTS), tiny_llama, 1e-2)
    rows = evidence.gradients[tiny_llama.token_embedding].clone()
    rows[300] = 0.0
    sent = evidence.with_tensors({**evidence.gradients, tiny_llama.token_embedding: rows})
    assert without_decay(sent, tiny_llama) == (sent, "")


def test_noise_of_the_size_of_roundings_moves_no_row(uneven_llama):
    """It was below the rounding of long rows, which told the decay, and above that of short ones, taken for tokens."""
    plain = observe_gradients(uneven_llama, TEXTS, task="classification")
    for sigma in ("1e-11", "1e-10", "1e-9", "1e-8"):
        noise = parse_defence(f"noise:sigma={sigma}")
        sent = noise(with_decay(plain, uneven_llama, 1e-2), torch.Generator().manual_seed(1))
        recovery = BagOfWordsAttack()(sent, uneven_llama)
        assert recovery.value.token_set <= WORDS, (sigma, recovery.reason)


@pytest.mark.parametrize("task", ["classification", "next_token"])
@pytest.mark.parametrize(
    "defence", ["fp16", "fp8", "int8", "topk:share=0.05", "random:share=0.3", "random:share=0.95", "noise:sigma=1e-6"]
)
def test_decay_that_few_digits_or_noise_blur_makes_no_token(uneven_llama, defence, task):
    """Long rows used to be taken for tokens, at an expected number of 1e-6 false ones."""
    plain = observe_gradients(uneven_llama, TEXTS, task=task, parameters=["embed"])
    for decay in (1e-1, 1e-3, 1e-6):
        sent = parse_defence(defence)(with_decay(plain, uneven_llama, decay), torch.Generator().manual_seed(1))
        recovery = BagOfWordsAttack()(sent.only("embed"), uneven_llama)
        assert recovery.value.token_set <= WORDS, (decay, recovery.reason)
