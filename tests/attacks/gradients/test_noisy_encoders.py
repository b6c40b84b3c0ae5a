"""Encoders whose updates have few digits or noise: texts are recovered, and no nearly right batch is ever certain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.sampling import sample

from unmask.attacks.recover import recover_text
from unmask.audit.cases.data import INVENTED_TEXTS
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.proof.noisy_agreement import agree_with_noise
from unmask.proof.replay import replay
from unmask.proof.verdicts import Ground
from unmask.protocols import observe_gradients
from unmask.recovery import Status

LABELS = [0, 1, 1, 0]
LINES = INVENTED_TEXTS[7:11]
DEFENCES = ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp8", "noise:sigma=1e-5"))]
NEARLY = ("right", "replaced", "swapped", "last replaced", "label", "missing")
SOME = ["encoder.layer.0.", "encoder.layer.5."]
Tokens = tuple[int, ...]


def encode(model: Model, lines: tuple[str, ...] = LINES) -> list[Tokens]:
    return [tuple(model.encode(line)) for line in lines]


def observe(
    model: Model, texts: list[Tokens], defence: str, parameters: Sequence[str] | None = None
) -> GradientEvidence:
    options = {"labels": LABELS[: len(texts)], "num_labels": 2, "parameters": parameters}
    evidence = observe_gradients(model, texts, task="classification", **options)
    return parse_defence(defence)(evidence, torch.Generator().manual_seed(1))


def assert_recovered(
    model: Model, texts: list[Tokens], defence: str, ground: Ground, parameters: Sequence[str] | None = None
) -> None:
    recovery = recover_text(observe(model, texts, defence, parameters), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert Counter(text.tokens for text in recovery.value.certain) == Counter(texts)
    assert recovery.value.token_set == {token for text in texts for token in text}
    assert recovery.certificate.claim == ground.value
    assert recovery.certificate.holds


@pytest.mark.slow
def test_two_texts_of_an_update_in_bfloat16(minilm):
    assert_recovered(minilm, encode(minilm)[:2], "bf16", Ground.ROUNDED_CLIENT, ["embeddings.", *SOME])


@sample("sigma", [1e-8, 1e-6], [1e-8])
def test_noise_that_fills_spans_and_leaves_tokens_exact(minilm, sigma):
    assert_recovered(minilm, encode(minilm)[:2], f"noise:sigma={sigma}", Ground.NOISY_CLIENT, ["embeddings.", *SOME])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defence", "ground"),
    [
        ("bf16", Ground.ROUNDED_CLIENT),
        ("fp16", Ground.ROUNDED_CLIENT),
        ("int8", Ground.ROUNDED_CLIENT),
        ("noise:sigma=1e-5", Ground.NOISY_CLIENT),
    ],
)
def test_four_texts(minilm, defence, ground):
    assert_recovered(minilm, encode(minilm), defence, ground)


LONG_LINES = (
    "the ferry was late again , so we sat on the cold harbour wall and counted the lights of the boats far out",
    "a slow and gentle film about two sisters who inherit a lighthouse and cannot agree on what to do with it",
    "nothing in the second half of the book is as good as its opening pages , which are funny and rather sad",
    "she plays the doctor with so much patience that one forgets how little the script has given her to say",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defence", "ground"), [("bf16", Ground.ROUNDED_CLIENT), ("noise:sigma=1e-5", Ground.NOISY_CLIENT)]
)
def test_texts_of_twenty_tokens_and_more(minilm, defence, ground):
    texts = encode(minilm, LONG_LINES)
    assert min(map(len, texts)) >= 20
    assert_recovered(minilm, texts, defence, ground)


@pytest.mark.slow
def test_shuffled_updates_claim_no_text(minilm):
    """Entries of each tensor in another order: their sizes stay, what they say is gone."""
    evidence = observe(minilm, encode(minilm)[:2], "bf16")
    generator = torch.Generator().manual_seed(0)
    shuffled = {
        name: g.flatten()[torch.randperm(g.numel(), generator=generator)].view_as(g)
        for name, g in evidence.gradients.items()
    }
    assert not recover_text(replace(evidence, gradients=shuffled), minilm).value.certain


def change(texts: list[Tokens], what: str) -> tuple[list[Tokens], list[int]]:
    """A nearly right batch, and its labels."""
    first, labels = list(texts[0]), list(LABELS)
    middle = len(first) // 2
    if what == "replaced":
        first[middle] = texts[1][2]
    if what == "swapped":
        first[middle], first[middle - 1] = first[middle - 1], first[middle]
    if what == "last replaced":
        first[-2] = texts[1][2]
    if what == "label":
        labels[0] = 1 - labels[0]
    if what == "missing":
        return texts[1:], labels[1:]
    return [tuple(first), *texts[1:]], labels


@pytest.mark.parametrize("defence", DEFENCES)
def test_only_the_right_batch_agrees(minilm, defence):
    texts = encode(minilm)
    evidence = observe(minilm, texts, defence, SOME)
    for what in NEARLY:
        changed, labels = change(texts, what)
        again = replay(evidence, minilm, changed, labels=labels)
        found = agree_with_noise(evidence, again, sum(map(len, changed)))
        assert found.holds == (what == "right"), (what, found.agreement)


@pytest.mark.slow
def test_a_random_update_claims_no_text(minilm):
    """Noise of the size of each tensor's entries, as it is and with few digits."""
    evidence = observe(minilm, encode(minilm)[:2], "bf16", SOME)
    generator = torch.Generator().manual_seed(0)
    random = {
        name: g.double().square().mean().sqrt().float() * torch.randn(g.shape, generator=generator)
        for name, g in evidence.gradients.items()
    }
    for gradients in (random, {name: g.bfloat16() for name, g in random.items()}):
        recovery = recover_text(replace(evidence, gradients=gradients), minilm)
        assert recovery.status is not Status.RECOVERED
        assert not recovery.value.certain


@pytest.mark.slow
def test_noise_that_hides_the_texts_makes_none_certain(minilm):
    texts = encode(minilm)
    recovery = recover_text(observe(minilm, texts, "noise:sigma=1e-4"), minilm)
    assert {text.tokens for text in recovery.value.certain} <= set(texts)
