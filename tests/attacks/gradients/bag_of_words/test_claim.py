"""What may be claimed of tokens without their order."""

from __future__ import annotations

import torch

from unmask.attacks.gradients.bag_of_words.claim import claim_tokens, read_tokens
from unmask.attacks.gradients.bag_of_words.token_filter import Candidates
from unmask.attacks.run import Run
from unmask.linalg.gap import Gap
from unmask.protocols import observe_gradients
from unmask.recovery import Aim, RecoveredTexts, Recovery, Status

CLEAR = Gap(1e-6, 1e-1)


def test_a_bag_of_words_is_partial_and_says_why():
    candidates = Candidates({-1: torch.tensor([3, 4])}, CLEAR, 500)
    recovery = claim_tokens(Run(), candidates, ["some.weight"], "nobody knows the order")
    assert recovery.status is Status.PARTIAL
    assert recovery.value == RecoveredTexts((), frozenset({3, 4}))
    assert recovery.reason.endswith("nobody knows the order")
    assert "2 tokens" in recovery.reason
    assert recovery.certificate.holds
    assert recovery.used == ("some.weight",)
    assert recovery.looked_for == {Aim.TOKENS}  # the order was never tried


def test_tokens_come_with_the_tensors_that_tell_them(tiny_gpt2):
    read = read_tokens(Run(), observe_gradients(tiny_gpt2, [[5, 6, 7]]), tiny_gpt2, 32, 1.0)
    assert not isinstance(read, Recovery)
    candidates, used = read
    assert candidates.tokens == {5, 6}  # the last token is a label only
    assert used


def test_an_update_without_them_ends_the_attack(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, [[5, 6, 7]], parameters=["ln_f"])
    read = read_tokens(Run(), evidence, tiny_gpt2, 32, 1.0)
    assert isinstance(read, Recovery)
    assert (read.status, read.value) == (Status.MISSING_EVIDENCE, RecoveredTexts())
