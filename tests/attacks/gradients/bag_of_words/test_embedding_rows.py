"""Tokens from embedding rows that moved: by a gradient, and by real optimisers that move all rows a little."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.families import build
from tests.sampling import sample
from torch import Tensor
from torch.nn import functional

from unmask.attacks.gradients.bag_of_words.attack import BagOfWordsAttack
from unmask.attacks.gradients.bag_of_words.embedding_rows import (
    find_doubtful_tokens,
    positions_from_rows,
    rows_beyond_decay,
    tokens_from_rows,
)
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence, Task, Update
from unmask.models import Model, adapt
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.protocols.batch import make_batch
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
SENTENCES = ["The biopsy was positive.", "Please wire 48,200 euros before Friday noon.", "She lives in Graz now."]
WORDS = {token for text in TEXTS for token in text}
Optimiser = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-5, weight_decay=0.01)


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, weight_decay=1e-4, momentum=0.9)


def train(model: Model, texts: Sequence[Any], make: Optimiser, num_steps: int) -> tuple[GradientEvidence, set[int]]:
    """A client that trains a classifier for some steps and sends new − old weights; and the tokens of its batch."""
    twin = model.to()
    batch = make_batch(twin, texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = torch.nn.Linear(twin.width, 2)
    before = {name: parameter.detach().clone() for name, parameter in twin.named_parameters()}
    optimiser = make([*(parameter for _, parameter in twin.named_parameters()), *head.parameters()])
    labels = torch.arange(len(texts)) % 2
    for _ in range(num_steps):
        optimiser.zero_grad()
        states = twin.body(input_ids=batch.tokens, attention_mask=batch.mask.long()).last_hidden_state
        pooled = (states * batch.mask[..., None]).sum(1) / batch.mask.sum(1, keepdim=True)
        functional.cross_entropy(head(pooled), labels).backward()
        optimiser.step()
    delta = {name: parameter.detach() - before[name] for name, parameter in twin.named_parameters()}
    evidence = GradientEvidence(delta, model.fingerprint(), Task.CLASSIFICATION, len(texts), Update.DELTA)
    return evidence, set(batch.tokens[batch.mask].tolist())


def tokens(evidence: GradientEvidence, model: Model) -> set[int] | None:
    found = tokens_from_rows(evidence, model)
    return None if found is None else set(found.tolist())


# ---- gradients


def test_rows_of_a_gradient_are_the_tokens_of_the_batch(tiny):
    evidence = observe_gradients(tiny, TEXTS, task="classification", pooling="mean")
    assert tokens(evidence, tiny) == WORDS


def test_rows_of_real_weights(minilm):
    evidence = observe_gradients(minilm, SENTENCES, task="classification", parameters=["embeddings."])
    assert tokens(evidence, minilm) == {token for text in SENTENCES for token in minilm.encode(text)}


@pytest.mark.parametrize("entries", [1, 2])
def test_rows_that_a_few_entries_fell_into_are_not_claimed(tiny_bert, entries):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification", parameters=["embeddings."])
    rows = evidence.gradients[tiny_bert.token_embedding].clone()
    rows[60:64, 3] = 1e-9
    rows[64, :entries] = -1e-9
    sent = evidence.with_tensors({tiny_bert.token_embedding: rows})
    assert find_doubtful_tokens(evidence, tiny_bert) == frozenset()
    assert {60, 61, 62, 63} <= find_doubtful_tokens(sent, tiny_bert)
    assert not find_doubtful_tokens(sent, tiny_bert) & WORDS
    assert BagOfWordsAttack()(sent, tiny_bert).value.token_set == (WORDS if entries < 3 else {*WORDS, 64})


@sample(
    "first, then",
    [
        ("noise:sigma=6e-9", "fp16"),
        ("noise:sigma=3.16859e-05", "int8"),
        ("noise:sigma=1.75437e-08", "fp8"),
        ("noise:sigma=3e-10", "int8:stochastic=true"),
    ],
    [("noise:sigma=3.16859e-05", "int8"), ("noise:sigma=3e-10", "int8:stochastic=true")],
)
def test_noise_just_before_few_digits_makes_no_token_certain(minilm, first, then):
    sent = observe_gradients(minilm, SENTENCES, task="classification", parameters=["embeddings."])
    generator = torch.Generator().manual_seed(1)
    for defence in (first, then):
        sent = parse_defence(defence)(sent, generator)
    held = {token for text in SENTENCES for token in minilm.encode(text)}
    assert BagOfWordsAttack()(sent, minilm).value.token_set <= held


@pytest.mark.parametrize("stated", [True, False])
def test_decay_below_the_rounding_of_most_weights_moves_rows_of_no_token(tiny_llama, stated):
    for decay in (2.9e-6, 2.981e-6, 2.985e-6, 3.1e-6, 4e-6):
        evidence = observe_fedavg(tiny_llama, TEXTS, learning_rate=1e-2, weight_decay=decay, parameters=["embed"])
        evidence = evidence if stated else replace(evidence, weight_decay=None)
        assert BagOfWordsAttack()(evidence, tiny_llama).value.token_set <= WORDS


def test_positions_that_were_filled(tiny_gpt2, tiny_bert, tiny_llama):
    for model in (tiny_gpt2, tiny_bert):
        evidence = observe_gradients(model, TEXTS, task="classification")
        positions = positions_from_rows(evidence, model)
        assert positions is not None
        assert positions.tolist() == list(range(max(map(len, TEXTS))))
    assert positions_from_rows(observe_gradients(tiny_llama, TEXTS), tiny_llama) is None


def test_rows_in_front_of_position_0_are_no_positions():
    """OPT's table has two of them."""
    model = adapt(build("OPT"))
    assert model.layout.embedding.offset == 2
    positions = positions_from_rows(observe_gradients(model, TEXTS, task="classification"), model)
    assert positions is not None
    assert positions.tolist() == list(range(max(map(len, TEXTS))))


def test_a_tied_output_layer_moves_every_row_and_tells_nothing(tiny_gpt2, tiny_qwen2, tiny_llama):
    assert tokens(observe_gradients(tiny_gpt2, TEXTS), tiny_gpt2) is None
    assert tokens(observe_gradients(tiny_qwen2, TEXTS), tiny_qwen2) is None
    untied = tokens(observe_gradients(tiny_llama, TEXTS), tiny_llama)
    assert untied == {token for text in TEXTS for token in text[:-1]}  # the last token is only a label


def test_an_update_without_the_embedding_or_with_a_silent_one_tells_nothing(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification")
    name = tiny_bert.token_embedding
    assert tokens(evidence.only("encoder."), tiny_bert) is None
    silent = {**evidence.gradients, name: torch.zeros_like(evidence.gradients[name])}
    assert tokens(replace(evidence, gradients=silent), tiny_bert) is None


def test_noise_on_every_row_tells_nothing(tiny_bert):
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification")
    name = tiny_bert.token_embedding
    for update in Update:
        noise = torch.randn(evidence.gradients[name].shape, generator=torch.Generator().manual_seed(0))
        noisy = replace(evidence, gradients={**evidence.gradients, name: 1e-3 * noise}, update=update)
        assert tokens(noisy, tiny_bert) is None


# ---- weight deltas of real optimisers


@pytest.mark.parametrize("num_steps", [1, 2, 5, 10, 40])
@pytest.mark.parametrize("optimiser", [adamw, sgd])
def test_the_delta_of_an_optimiser_shows_the_tokens_and_no_others(tiny_bert, optimiser, num_steps):
    """Weight decay moves every row, and each step rounds every weight once more."""
    evidence, words = train(tiny_bert, TEXTS, optimiser, num_steps)
    assert words == WORDS
    assert tokens(evidence, tiny_bert) == words


@sample("num_steps", [1, 5, 12], [1])
def test_the_delta_of_adamw_on_real_weights(minilm, num_steps):
    evidence, words = train(minilm, SENTENCES, adamw, num_steps)
    assert tokens(evidence, minilm) == words


@sample("num_steps", [1, 10, 11, 40, 200], [1, 10, 11, 40])
def test_many_steps_never_make_a_false_token_certain(tiny_bert, num_steps):
    evidence, words = train(tiny_bert, TEXTS, adamw, num_steps)
    recovery = BagOfWordsAttack()(evidence, tiny_bert)
    if recovery.status is Status.PARTIAL and recovery.certificate.holds:
        assert recovery.value.token_set <= words


def test_the_delta_of_a_client_without_weight_decay(tiny_bert):
    plain = lambda parameters: torch.optim.AdamW(parameters, lr=5e-5, weight_decay=0.0)  # noqa: E731
    evidence, words = train(tiny_bert, TEXTS, plain, 3)
    assert tokens(evidence, tiny_bert) == words


@pytest.mark.parametrize("learning_rate", [1e-2, 1e-4, 1e-6])
def test_however_small_the_steps_of_sgd_rows_that_never_moved_are_zero(minilm, learning_rate):
    """At 1e-6 a third of the entries of a row move at all, by a rounding or two."""
    evidence = observe_fedavg(
        minilm, SENTENCES, task="classification", learning_rate=learning_rate, parameters=["embeddings."]
    )
    assert tokens(evidence, minilm) == {token for text in SENTENCES for token in minilm.encode(text)}


def test_decay_that_nobody_mentioned_is_no_token_after_pruning(tiny_bert):
    """Some rows are zero because nothing of them was sent: all others shrink, which tells the decay."""
    weights = tiny_bert.parameter(tiny_bert.token_embedding).detach()
    kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0)) < 0.05
    delta = {tiny_bert.token_embedding: -1e-4 * weights * kept}
    evidence = GradientEvidence(delta, tiny_bert.fingerprint(), Task.CLASSIFICATION, 3, Update.DELTA)
    assert tokens(evidence, tiny_bert) is None


# ---- defences that leave zeros zero


@pytest.mark.parametrize("defence", ["int8", "fp8", "bf16", "topk:share=0.1", "random:share=0.1", "clip:norm=0.01"])
def test_defences_that_leave_zeros_zero_leave_the_tokens(minilm, defence):
    evidence = observe_gradients(minilm, SENTENCES, task="classification", parameters=["embeddings."])
    sent = parse_defence(defence)(evidence, torch.Generator().manual_seed(0))
    assert tokens(sent, minilm) == {token for text in SENTENCES for token in minilm.encode(text)}


@sample(
    "after, sigma",
    product(("clip:norm=1", "topk:share=0.1", "topk:share=0.01", "random:share=0.01", "int8"), (1e-5, 1e-3, 1e-1)),
    [
        ("clip:norm=1", 1e-3),
        ("topk:share=0.1", 1e-5),
        ("topk:share=0.01", 1e-3),
        ("random:share=0.01", 1e-1),
        ("int8", 1e-5),
    ],
)
def test_noise_of_which_a_part_is_sent_yields_no_false_token(minilm, sigma, after):
    """Negative control: empty rows are what chance left of them."""
    evidence = observe_gradients(minilm, SENTENCES, task="classification", parameters=["embeddings."])
    generator = torch.Generator().manual_seed(0)
    noisy = parse_defence(f"noise:sigma={sigma}")(evidence, generator)
    found = tokens(parse_defence(after)(noisy, generator), minilm)
    assert found is None or found <= {token for text in SENTENCES for token in minilm.encode(text)}


@pytest.mark.parametrize("defence", ["int8", "topk:share=0.1", "topk:share=0.01", "random:share=0.1"])
def test_a_tied_output_layer_tells_nothing_after_pruning(tiny_gpt2, tiny_qwen2, defence):
    for model in (tiny_gpt2, tiny_qwen2):
        sent = parse_defence(defence)(observe_gradients(model, TEXTS), torch.Generator().manual_seed(0))
        assert tokens(sent, model) is None
        assert tokens(replace(sent, task=None), model) is None


def test_scattered_entries_are_no_rows(tiny_bert):
    """Negative control: a gradient's own entries, shuffled, leave some rows empty."""
    evidence = observe_gradients(tiny_bert, TEXTS, task="classification")
    name, generator = tiny_bert.token_embedding, torch.Generator().manual_seed(0)
    entries = evidence.gradients[name].flatten()
    shuffled = entries[torch.randperm(len(entries), generator=generator)].reshape(evidence.gradients[name].shape)
    assert (shuffled == 0).all(1).any()
    assert tokens(replace(evidence, gradients={name: shuffled}), tiny_bert) is None


# ---- the decay alone


@settings(max_examples=25)
@given(decay=st.floats(0, 1e-2), seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_rows_that_only_decayed_did_not_move(decay, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    weights = scale * torch.randn(40, 16, generator=generator)
    delta = weights * (1 - decay) - weights
    assert not rows_beyond_decay(weights, delta).any()
    moved = delta.clone()
    # A thousandth of a weight, ten thousand times the rounding of float32.
    moved[[3, 17]] += 1e-3 * scale * torch.randn(2, 16, generator=generator)
    assert rows_beyond_decay(weights, moved).nonzero()[:, 0].tolist() == [3, 17]


def test_a_row_of_zeros_is_no_stumbling_block():
    """Embeddings of padding are zero: nothing decays, and nothing may be divided by."""
    weights = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    weights[0] = 0
    assert not rows_beyond_decay(weights, -1e-4 * weights).any()
