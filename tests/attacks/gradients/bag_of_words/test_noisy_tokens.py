"""Tokens under noise: most of them on real weights, none where there are none, and the noise as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from baselines.dager_sweep import authors_settings
from tests.sampling import sample
from torch import Tensor

from unmask import recover_text
from unmask.attacks.baselines.dager import Dager
from unmask.attacks.gradients.bag_of_words.attack import BagOfWordsAttack
from unmask.attacks.gradients.bag_of_words.noisy_tokens import (
    NoisyTokens,
    find_noisy_tokens,
    is_adaptive,
    rows_above_noise,
)
from unmask.defences import parse_defence
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.recovery import Status

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
WORDS = {token for text in TEXTS for token in text}
SPAN = ("attn.c_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "attention.self")
SENTENCES = ["The biopsy was positive.", "Please wire 48,200 euros before Friday noon.", "She lives in Graz now."]


def seen(model: Model, defence: str, seed: int = 0, only: tuple[str, ...] = SPAN) -> GradientEvidence:
    evidence = observe_gradients(model, TEXTS, task="classification", pooling="mean").only(*only)
    return parse_defence(defence)(evidence, torch.Generator().manual_seed(seed))


def find(evidence: GradientEvidence, model: Model) -> NoisyTokens:
    return find_noisy_tokens(evidence, model, torch.Generator().manual_seed(0))


def tokens(found: NoisyTokens) -> set[int]:
    return set(found.tokens.tolist())


# The span


@pytest.mark.parametrize("kind", ["noise", "laplace"])
@sample("seed", range(3), [0])
def test_the_span_under_noise_shows_tokens_and_no_others(tiny, kind, seed):
    """A twentieth of a tensor's root mean square on every entry."""
    found = find(seen(tiny, f"{kind}:sigma=0.05,relative=true", seed), tiny)
    assert tokens(found) <= WORDS
    assert len(tokens(found)) >= len(WORDS) - 3
    assert 0 < found.expected_false <= 0.5


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_tokens_that_weights_hold_are_none_of_a_gradient_with_decay(tiny_llama, decay):
    """Training leaves a model's tokens in its weights, and decay puts these into every gradient."""
    model, generator = tiny_llama.to(), torch.Generator().manual_seed(0)
    strangers = torch.arange(300, 316)
    rows = model.first_input(strangers, torch.zeros_like(strangers)).detach()
    for name, weights in model.named_parameters():
        if name.startswith("model.layers.0.self_attn") and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            weights.data += torch.randn(len(weights), 16, generator=generator) @ rows / 16
    evidence = seen(model, "noise:sigma=1e-3,relative=true")
    held = {name: g + decay * model.parameter(name).detach() for name, g in evidence.gradients.items()}
    found = tokens(find(replace(evidence, gradients=held), model))
    assert found <= WORDS
    assert bool(found) == (decay == 0)


def test_the_noise_is_estimated(tiny_llama):
    found = find(seen(tiny_llama, "noise:sigma=1e-3"), tiny_llama)
    # Some hundred to some thousand entries outside of the tokens' span.
    assert list(found.noise.values()) == pytest.approx([1e-3] * len(found.noise), rel=0.1)
    assert all(size > 1e-3 for size in found.signal.values())


def test_noise_that_the_protocol_publishes_is_used(tiny_llama):
    sent = replace(seen(tiny_llama, "noise:sigma=1e-3"), noise_std=1e-3)
    found = find(sent, tiny_llama)
    assert list(found.noise.values()) == pytest.approx([1e-3] * len(found.noise), rel=0.1)
    assert tokens(found) <= WORDS
    assert found.tokens.numel()


@pytest.mark.parametrize("defence", ["noise:sigma=0", "noise:sigma=0.05,relative=true"])
def test_weight_deltas_are_as_noisy_as_the_rounding_of_weights_or_more(tiny_llama, defence):
    """At a learning rate of 1e-4 the weights' rounding is a tenth of a step; noise comes on top, on all alike."""
    evidence = observe_fedavg(tiny_llama, TEXTS, task="classification", learning_rate=1e-4).only(*SPAN)
    found = find(parse_defence(defence)(evidence, torch.Generator().manual_seed(0)), tiny_llama)
    assert tokens(found) <= WORDS
    assert len(tokens(found)) >= len(WORDS) - 3


@pytest.mark.parametrize("num_steps", [1, 5])
def test_steps_of_an_adaptive_optimiser_are_told_and_read_by_rows_alone(tiny_llama, num_steps):
    """Adam divides every entry by its own size: its columns are no combinations of inputs."""
    options = {"task": "classification", "local_steps": num_steps}
    adam = observe_fedavg(tiny_llama, TEXTS, optimizer="adamw", learning_rate=1e-4, **options).only(*SPAN)
    plain = observe_fedavg(tiny_llama, TEXTS, optimizer="sgd", learning_rate=1e-2, **options).only(*SPAN)
    for name in adam.gradients:
        assert is_adaptive(adam, adam.gradients[name])
        assert not is_adaptive(plain, plain.gradients[name])
    assert not find(adam, tiny_llama).noise
    recovery = BagOfWordsAttack()(adam, tiny_llama)
    assert recovery.status is Status.NOT_APPLICABLE
    assert "adaptive optimiser" in recovery.reason


def test_noise_that_is_not_white_is_taken_for_louder(tiny_llama):
    """A few entries with a hundred times the noise of all others look like directions of their own."""
    evidence = seen(tiny_llama, "noise:sigma=1e-6")
    generator = torch.Generator().manual_seed(1)
    spiked = {
        name: tensor + 1e-4 * torch.randn(tensor.shape, generator=generator) * (torch.rand(tensor.shape) < 0.1)
        for name, tensor in evidence.gradients.items()
    }
    found = find(replace(evidence, gradients=spiked), tiny_llama)
    assert tokens(found) <= WORDS
    assert len(tokens(found)) >= len(WORDS) - 3


# Rows of the embedding


@pytest.mark.parametrize("kind", ["noise", "laplace"])
@pytest.mark.parametrize("seed", range(5))
def test_rows_under_noise(tiny_bert, kind, seed):
    sent = seen(tiny_bert, f"{kind}:sigma=1e-3", seed, ("word_embeddings",))
    found, sigma = rows_above_noise(sent, tiny_bert)
    assert set(found.tolist()) <= WORDS
    assert len(found) >= len(WORDS) // 2
    assert sigma == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("seed", range(5))
def test_entries_that_are_scattered_over_the_rows_are_no_tokens(tiny_bert, noise, seed):
    evidence, generator = (
        observe_gradients(tiny_bert, TEXTS, task="classification"),
        torch.Generator().manual_seed(seed),
    )
    name = tiny_bert.token_embedding
    rows = evidence.gradients[name]
    scattered = rows.flatten()[torch.randperm(rows.numel(), generator=generator)].view(rows.shape)
    for values, is_claimed in ((rows, noise > 0), (scattered, False)):  # rows of zeros are told by embedding_rows.py
        sent = evidence.with_tensors({name: values + noise * torch.randn(rows.shape, generator=generator)})
        assert bool(len(rows_above_noise(sent, tiny_bert)[0])) == is_claimed


def test_rows_of_a_tied_output_layer_tell_nothing(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    sent = parse_defence("noise:sigma=1e-3")(evidence, torch.Generator().manual_seed(0))
    assert rows_above_noise(sent, tiny_gpt2) == (pytest.approx(torch.zeros(0)), None)


def test_rows_and_span_together_show_no_less_than_either(tiny_bert):
    both, rows, span = (
        tokens(find(seen(tiny_bert, "noise:sigma=0.2,relative=true", only=only), tiny_bert))
        for only in (("word_embeddings", *SPAN), ("word_embeddings",), SPAN)
    )
    assert both <= WORDS
    assert len(both) >= max(len(rows), len(span))


# Negative controls


def noise(evidence: GradientEvidence, generator: torch.Generator) -> dict[str, Tensor]:
    parts = {name: torch.randn(g.shape, generator=generator) for name, g in evidence.gradients.items()}
    return {name: part * (evidence.gradients[name].norm() / part.norm()) for name, part in parts.items()}


@sample("seed", range(4), [0, 1])
def test_noise_of_the_same_norm_shows_no_token(tiny, seed):
    evidence = seen(tiny, "noise:sigma=0", only=("word_embeddings", *SPAN))
    found = find(replace(evidence, gradients=noise(evidence, torch.Generator().manual_seed(seed))), tiny)
    assert not tokens(found)
    assert found.expected_false == 0


@pytest.mark.parametrize("sigma", ["0.03", "0.1", "0.3"])
@sample("seed", range(4), [0, 1])
def test_directions_that_belong_to_no_token_show_none(tiny_llama, seed, sigma):
    """The gradients of other weights, in effect: the same spectrum, turned at random."""
    evidence = seen(tiny_llama, f"noise:sigma={sigma},relative=true", seed)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)))[0]
    turned = {name: g @ turn if g.ndim == 2 else g for name, g in evidence.gradients.items()}
    assert not tokens(find(replace(evidence, gradients=turned), tiny_llama))


def test_an_update_without_block_0_and_embeddings_has_no_noise_to_speak_of(tiny_bert):
    found = find(observe_gradients(tiny_bert, TEXTS, task="classification").only("layer.1."), tiny_bert)
    assert not found.noise
    assert not tokens(found)


# Real weights


@pytest.fixture(scope="module")
def withheld(minilm: Model) -> GradientEvidence:
    """Without embeddings: what the span of block 0 tells alone."""
    parameters = ["layer.0.", "layer.1.attention", "layer.5.attention"]
    return observe_gradients(minilm, SENTENCES, task="classification", parameters=parameters)


@sample("defence", ["noise:sigma=1e-4", "int8", "fp8"], ["noise:sigma=1e-4"])
def test_real_weights_give_up_their_tokens(minilm, withheld, defence):
    """End to end."""
    sent = parse_defence(defence)(withheld, torch.Generator().manual_seed(0))
    recovery = BagOfWordsAttack()(sent, minilm)
    words = {token for text in SENTENCES for token in minilm.encode(text)}
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert recovery.value.token_set <= words
    assert len(recovery.value.token_set) >= 0.9 * len(words)
    assert not recovery.value.texts
    assert recovery.certificate.details["expected_false"] <= 0.5


@pytest.mark.slow
def test_dager_with_its_authors_settings_reads_the_clean_update_and_no_token_under_noise(minilm, withheld):
    sent = parse_defence("noise:sigma=1e-4")(withheld, torch.Generator().manual_seed(0))
    theirs = Dager(**authors_settings(len(SENTENCES)))
    assert theirs(withheld, minilm).value.token_set >= {token for text in SENTENCES for token in minilm.encode(text)}
    assert not theirs(sent, minilm).value.token_set


@pytest.mark.slow
def test_the_whole_attack_calls_nothing_certain(minilm, withheld):
    sent = parse_defence("noise:sigma=1e-4")(withheld, torch.Generator().manual_seed(1))
    recovery = recover_text(sent, minilm)
    assert recovery.status is Status.PARTIAL
    assert recovery.value.token_set <= {token for text in SENTENCES for token in minilm.encode(text)}
    assert not recovery.value.certain


@pytest.mark.slow
def test_noise_of_the_same_norm_on_real_weights_is_not_applicable(minilm, withheld):
    recovery = BagOfWordsAttack()(
        replace(withheld, gradients=noise(withheld, torch.Generator().manual_seed(0))), minilm
    )
    assert recovery.status is Status.NOT_APPLICABLE, recovery.reason
    assert not recovery.value.token_set
