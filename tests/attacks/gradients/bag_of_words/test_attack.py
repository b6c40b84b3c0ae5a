"""The bag of words as a recovery: exact, statistical, or a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask.attacks.gradients.bag_of_words.attack import BagOfWordsAttack
from unmask.defences import parse_defence
from unmask.proof.conclusions import MOST_EXPECTED_FALSE
from unmask.protocols import observe_gradients
from unmask.recovery import Aim, Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
WORDS = {token for text in TEXTS for token in text}


def test_an_exact_bag_expects_nothing_false(tiny):
    recovery = BagOfWordsAttack()(observe_gradients(tiny, TEXTS, task="classification", pooling="mean"), tiny)
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set == WORDS
    assert "expected_false" not in recovery.certificate.details


@pytest.mark.parametrize("seed", range(3))
def test_a_statistical_bag_states_its_false_tokens_and_is_never_whole(tiny, seed):
    evidence = observe_gradients(tiny, TEXTS, task="classification", pooling="mean")
    sent = parse_defence("noise:sigma=0.1,relative=true")(evidence, torch.Generator().manual_seed(seed))
    recovery = BagOfWordsAttack()(sent, tiny)
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert recovery.value.token_set <= WORDS
    assert not recovery.value.texts
    certificate = recovery.certificate
    assert certificate.holds
    assert certificate.residual == certificate.details["expected_false"] <= MOST_EXPECTED_FALSE
    assert any(name.startswith("noise of") for name in certificate.details)
    assert "clearly above rounding and noise (expected false ones: 0." in recovery.reason
    assert certificate.unit == "tokens"
    assert recovery.looked_for == {Aim.TOKENS}
    assert set(recovery.used) <= set(evidence.gradients)


def test_the_result_does_not_depend_on_the_run(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification")
    sent = parse_defence("noise:sigma=0.1,relative=true")(evidence, torch.Generator().manual_seed(0))
    one, other = BagOfWordsAttack()(sent, tiny_bert), BagOfWordsAttack()(sent, tiny_bert)
    assert one.value == other.value
    assert one.certificate == other.certificate


def test_noise_alone_claims_nothing(tiny):
    evidence = observe_gradients(tiny, TEXTS, task="classification")
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    recovery = BagOfWordsAttack()(replace(evidence, gradients=noise), tiny)
    assert not recovery.status.conclusive
    assert not recovery.certificate.holds
    assert not recovery.value.token_set
