"""The bag of words by the strongest evidence at hand; and, where there is none, a status and a reason that is true."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch

from unmask.attacks.gradients.candidates import BagOfWords, find_candidates
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.protocols import observe_gradients
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
WORDS = {token for text in TEXTS for token in text}
SPAN = ("attn.c_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "attention.self")


def find(evidence: GradientEvidence, model: Model, min_gap_decades: float = 1.0) -> BagOfWords:
    generator = torch.Generator().manual_seed(0)
    return find_candidates(evidence, model, num_probes=32, min_gap_decades=min_gap_decades, generator=generator)


def classified(model: Model) -> GradientEvidence:
    return observe_gradients(model, TEXTS, task="classification")


def test_embedding_rows_come_first(tiny):
    bag = find(classified(tiny), tiny)
    assert bag.candidates is not None
    assert bag.candidates.tokens >= (WORDS if tiny.causal else set())
    assert tiny.token_embedding in bag.used


def test_the_span_comes_second(tiny):
    evidence = classified(tiny).only(*SPAN)
    bag = find(evidence, tiny)
    assert bag.candidates is not None
    assert bag.candidates.tokens == WORDS
    assert bag.used
    assert set(bag.used) <= set(evidence.gradients)


def test_both_agree(tiny):
    evidence = classified(tiny)
    rows, span = find(evidence, tiny).candidates, find(evidence.only(*SPAN), tiny).candidates
    assert rows is not None
    assert span is not None
    assert rows.tokens == span.tokens


def test_what_it_used_is_enough_for_the_same_candidates(tiny):
    evidence = classified(tiny)
    bag = find(evidence, tiny)
    again = find(replace(evidence, gradients={name: evidence.gradients[name] for name in bag.used}), tiny)
    assert bag.candidates is not None
    assert again.candidates is not None
    assert again.candidates.by_position.keys() == bag.candidates.by_position.keys()
    assert again.candidates.tokens == bag.candidates.tokens


def test_nothing_useful_is_missing_evidence(tiny):
    evidence = classified(tiny).only("norm", "ln_", "LayerNorm")
    bag = find(evidence, tiny)
    assert bag.candidates is None
    assert bag.status is Status.MISSING_EVIDENCE
    assert str(len(evidence.gradients)) in bag.reason
    assert tiny.token_embedding in bag.reason


def test_a_full_span_is_not_identifiable(tiny_gpt2):
    rng = random.Random(0)
    texts = [[rng.randrange(500) for _ in range(12)] for _ in range(8)]
    bag = find(observe_gradients(tiny_gpt2, texts), tiny_gpt2)
    assert bag.candidates is None
    assert bag.status in (Status.NOT_IDENTIFIABLE, Status.NOTHING_FOUND)
    assert bag.used == ("h.0.attn.c_attn.weight",)


def test_noise_is_not_identifiable_and_names_the_width(tiny):
    evidence = classified(tiny).only(*SPAN)
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    bag = find(replace(evidence, gradients=noise), tiny)
    assert bag.candidates is None
    assert bag.status is Status.NOT_IDENTIFIABLE
    assert str(tiny.width) in bag.reason


@pytest.mark.parametrize("rank", [3, 20])
def test_a_span_without_tokens_gives_a_reason_that_is_true(tiny, rank):
    """'A gap of only 6.6 decades where 1.0 are asked for' is no reason: there was no token at all."""
    evidence = classified(tiny).only(*SPAN)
    generator = torch.Generator().manual_seed(0)

    def low_rank(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.ndim < 2:
            return gradient
        left = torch.randn(gradient.shape[0], rank, generator=generator)
        return left @ torch.randn(rank, gradient.shape[1], generator=generator)

    fake = replace(evidence, gradients={name: low_rank(g) for name, g in evidence.gradients.items()})
    bag = find(fake, tiny)
    assert bag.candidates is None
    numbers = re.search(r"gap of only (\S+) decades where (\S+) are asked for", bag.reason)
    if numbers is not None:
        assert float(numbers[1]) < float(numbers[2])


def test_a_gap_that_nobody_reaches_yields_nothing(tiny_llama):
    bag = find(classified(tiny_llama).only(*SPAN), tiny_llama, min_gap_decades=20.0)
    assert bag.candidates is None
    assert bag.status is Status.NOTHING_FOUND
    assert "20.0" in bag.reason
