"""The bag of words by the strongest evidence at hand; and, where there is none, a status and a reason that is true."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from tests.sampling import sample

from unmask.attacks.gradients.bag_of_words.candidates import BagOfWords, find_candidates
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.protocols import observe_fedavg, observe_gradients
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


@sample("seed", range(3), [0])
def test_a_full_span_gives_up_no_false_token(tiny_gpt2, seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(500) for _ in range(12)] for _ in range(8)]
    bag = find(observe_gradients(tiny_gpt2, texts), tiny_gpt2)
    found = frozenset() if bag.candidates is None else bag.candidates.tokens
    assert found <= {token for text in texts for token in text}
    assert (bag.expected_false is None) == (bag.candidates is None)
    assert bag.used[0] == "h.0.attn.c_attn.weight"
    assert set(bag.used[1:]) <= {tiny_gpt2.token_embedding}  # rows of the tied embedding may tell some


def test_noise_alone_is_not_applicable_and_names_the_width_and_the_noise(tiny):
    evidence = classified(tiny).only(*SPAN)
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    bag = find(replace(evidence, gradients=noise), tiny)
    assert bag.candidates is None
    assert bag.status is Status.NOT_APPLICABLE
    assert f"width {tiny.width}" in bag.reason
    assert "0 directions" in bag.reason
    assert all(f"'{name}' " in bag.reason for name in bag.used)
    # Noise of σ = 1; its estimate from 64 singular values is right to some per cent.
    assert all(abs(value - 1) < 0.1 for name, value in bag.details.items() if name.startswith("noise of"))


@pytest.mark.parametrize("rank", [3, 20])
def test_a_span_without_tokens_gives_a_reason_that_is_true(tiny, rank):
    """'A gap of only 6.6 decades where 1.0 is asked for' is no reason: there was no token at all."""
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
    numbers = re.search(r"gap of only (\S+) decades, and (\S+) decades are asked for", bag.reason)
    if numbers is not None:
        assert float(numbers[1]) < float(numbers[2])


def test_where_no_gap_is_wide_enough_the_tokens_are_statistical(tiny_llama):
    bag = find(classified(tiny_llama).only(*SPAN), tiny_llama, min_gap_decades=20.0)
    assert bag.candidates is not None
    assert bag.candidates.tokens == WORDS
    assert bag.expected_false is not None
    assert bag.expected_false <= 0.5


# Noise, coarse numbers and weight deltas


def test_exact_candidates_expect_nothing_false(tiny):
    assert find(classified(tiny), tiny).expected_false is None
    assert find(classified(tiny).only(*SPAN), tiny).expected_false is None


@pytest.mark.parametrize("defence", ["noise:sigma=0.1,relative=true", "laplace:sigma=0.1,relative=true"])
def test_noise_leaves_a_statistical_bag(tiny_llama, defence):
    sent = parse_defence(defence)(classified(tiny_llama).only(*SPAN), torch.Generator().manual_seed(0))
    bag = find(sent, tiny_llama)
    assert bag.candidates is not None, bag.reason
    assert bag.candidates.tokens <= WORDS
    assert len(bag.candidates.tokens) >= 10
    assert bag.expected_false == pytest.approx(0.5)
    assert {f"noise of {name}" for name in bag.used} <= set(bag.details)


def test_rows_under_noise_need_no_other_gradient(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification", pooling="mean").only("word_embeddings")
    sent = parse_defence("noise:sigma=1e-3")(evidence, torch.Generator().manual_seed(0))
    bag = find(sent, tiny_bert)
    assert bag.candidates is not None
    assert bag.candidates.tokens <= WORDS
    assert bag.used == (tiny_bert.token_embedding,)


def test_a_step_below_the_rounding_of_the_weights_is_not_applicable(tiny_bert):
    """The reason names the learning rate, the noise that is the rounding, and the signal."""
    evidence = observe_fedavg(tiny_bert, TEXTS, task="classification", learning_rate=1e-7).only("attention.self")
    bag = find(evidence, tiny_bert)
    assert bag.candidates is None
    assert not bag.status.conclusive
    assert "learning rate of 1e-07" in bag.reason
    assert "noise on signal" in bag.reason


@pytest.mark.parametrize("destroy", ["noise", "low rank"])
def test_destroyed_gradients_leave_no_statistical_bag(tiny_llama, destroy):
    """Negative controls: noise alone, and few directions that belong to no token under noise."""
    evidence = classified(tiny_llama).only(*SPAN)
    generator = torch.Generator().manual_seed(0)

    def fake(gradient: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(gradient.shape, generator=generator)
        if destroy == "noise" or gradient.ndim < 2:
            return noise
        left = torch.randn(gradient.shape[0], 8, generator=generator)
        return left @ torch.randn(8, gradient.shape[1], generator=generator) + 0.1 * noise

    bag = find(replace(evidence, gradients={name: fake(g) for name, g in evidence.gradients.items()}), tiny_llama)
    assert bag.candidates is None


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_bert"])
def test_dropout_is_not_taken_for_safety(name, request):
    """No token lies in the span of a client with dropout: the attack does not apply, it did not find nothing."""
    model = request.getfixturevalue(name)
    evidence = observe_gradients(model, [[3, 9, 27, 81]], task="classification", train_mode=True)
    kept = evidence.only("query", "key", "value", "c_attn")
    found = find_candidates(kept, model, num_probes=32, min_gap_decades=1.0, generator=torch.Generator().manual_seed(0))
    assert found.candidates is None
    assert found.status in (Status.NOT_APPLICABLE, Status.NOT_IDENTIFIABLE)


def test_rows_that_would_tell_are_hinted_at(tiny_bert):
    """An encoder without a head may have borrowed its embedding to predict tokens; nobody says that it did not."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 400, (8,), generator=generator).tolist() for _ in range(12)]
    evidence = observe_fedavg(tiny_bert, texts, task="classification", local_steps=2, learning_rate=0.05)
    bare = GradientEvidence.of(tiny_bert, dict(evidence.gradients), update="delta")
    found = find_candidates(bare, tiny_bert, 32, 1.0, torch.Generator().manual_seed(0))
    assert found.candidates is None
    assert "state task='classification' if it does not" in found.reason
    stated = find_candidates(replace(bare, task=evidence.task), tiny_bert, 32, 1.0, torch.Generator().manual_seed(0))
    assert stated.candidates is not None
    assert stated.candidates.tokens >= {token for text in texts for token in text}
