"""The front door for texts takes vectors: it checks them, and runs the attack on the precision that the model had."""

from __future__ import annotations

import pytest
import torch

import unmask
from unmask.attacks.claims import claim_nothing
from unmask.attacks.recover import choose_attack
from unmask.attacks.run import Run
from unmask.errors import EvidenceError, InputError
from unmask.protocols import observe_vectors
from unmask.recovery import Status

TEXTS = [[5, 17, 99], [400, 3]]


def test_an_attack_is_given_vectors_and_model(tiny_bert):
    seen = []

    def attack(evidence, model, progress):
        seen.append((evidence, model))
        return claim_nothing(Run(), Status.NOTHING_FOUND, "nothing was tried", ("vectors",))

    evidence = observe_vectors(tiny_bert, TEXTS)
    recovery = unmask.recover_text(evidence, tiny_bert, attack=attack)
    assert recovery.status is Status.NOTHING_FOUND
    ((given, model),) = seen
    assert torch.equal(given.vectors, evidence.vectors)
    assert model is tiny_bert


def test_vectors_have_an_attack_of_their_own(tiny_bert, tiny_llama):
    for model in (tiny_bert, tiny_llama):
        assert choose_attack(observe_vectors(model, TEXTS), model) == "embedding"
    with pytest.raises(InputError, match="'prompt' recovers"):
        unmask.recover_text(observe_vectors(tiny_bert, TEXTS), tiny_bert, attack="prompt")


def test_vectors_of_another_model_are_refused(tiny_bert, tiny_llama):
    with pytest.raises(EvidenceError, match="made with a model of fingerprint"):
        unmask.recover_text(observe_vectors(tiny_llama, TEXTS), tiny_bert, attack=lambda *_: None)
