"""The client run again on texts of a noisy update: the right ones are confirmed, nearly right ones are not."""

from collections import Counter
from itertools import product

import pytest
import torch
from tests.sampling import in_turn, sample

from unmask.attacks.gradients.decoder.confirm import Proof
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.noisy.confirm import confirm_noisy, is_unstable
from unmask.defences import parse_defence
from unmask.protocols import observe_fedavg, observe_gradients

FIRST, SECOND, THIRD = (5, 17, 99, 17, 250, 8, 30), (400, 3, 8, 21, 11, 12), (400, 3, 8, 9)
RIGHT = (FIRST, SECOND, THIRD)
WRONG = {
    "last token": ((*FIRST[:-1], 31), SECOND, THIRD),
    "one token short": (FIRST[:-1], SECOND, THIRD),
    "one token more": ((*FIRST, 30), SECOND, THIRD),
    "two swapped": ((17, 5, *FIRST[2:]), SECOND, THIRD),
    "a text missing": (FIRST, SECOND),
    "a text twice": (FIRST, SECOND, THIRD, THIRD),
    "a text too many": (*RIGHT, (5, 17)),
}
DEFENCES = {
    "bf16": Proof.ROUNDED_CLIENT,
    "fp8": Proof.ROUNDED_CLIENT,
    "int8": Proof.ROUNDED_CLIENT,
    "topk:share=0.5": Proof.ROUNDED_CLIENT,
    "random:share=0.5": Proof.ROUNDED_CLIENT,
    "noise:sigma=1e-5": Proof.NOISY_CLIENT,
    "noise:sigma=1e-3": Proof.NOISY_CLIENT,
}


def observe(model, defence):
    evidence = observe_gradients(model, [list(text) for text in RIGHT])
    return parse_defence(defence)(evidence, torch.Generator().manual_seed(1))


def endings(texts):
    return [TextEnding((0, text), count, 0.0) for text, count in Counter(texts).items()]


def confirm(model, defence, texts):
    # Without corrections; weights of texts could repair some of these batches, so the update is read as it is.
    return confirm_noisy(observe(model, defence), model, endings(texts), lambda chosen, again: chosen)


@pytest.mark.parametrize("defence", DEFENCES)
def test_the_right_texts_in_any_order_are_confirmed(tiny_llama, defence):
    assert confirm(tiny_llama, defence, RIGHT[::-1]).proof is DEFENCES[defence]


@sample("defence, wrong", product(DEFENCES, WRONG), in_turn(DEFENCES, WRONG))
def test_nearly_right_texts_are_confirmed_only_if_they_become_right(tiny_llama, defence, wrong):
    found = confirm(tiny_llama, defence, WRONG[wrong])
    if found.proof is not Proof.NONE:
        assert {ending.node[1] for ending in found.endings} == set(RIGHT)
        assert all(ending.count == 1 for ending in found.endings)


@pytest.mark.parametrize(("rate", "expected"), [(1e-3, False), (30.0, True)])
def test_local_training_that_diverges_cannot_be_confirmed(tiny_llama, rate, expected):
    evidence = observe_fedavg(tiny_llama, [list(text) for text in RIGHT], local_steps=12, learning_rate=rate)
    assert is_unstable(evidence, tiny_llama, RIGHT, evidence.gradients) is expected
    found = confirm_noisy(evidence, tiny_llama, endings(sorted(RIGHT)), lambda chosen, again: chosen)
    assert found.is_unstable is expected
    assert (found.proof is Proof.CLIENT) is not expected
