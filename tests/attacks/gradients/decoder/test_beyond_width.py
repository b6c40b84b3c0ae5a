"""Batches with more tokens than the width: rows verify each other, and nothing false is ever certain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

import unmask
from unmask.attacks.gradients.decoder.beyond_width import dependencies, wide_site
from unmask.evidence import GradientEvidence
from unmask.linalg.subspace import column_span
from unmask.models import Model, adapt

D, VOCAB = 128, 2000


def wide_gpt2(width: int = D) -> Model:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=width, n_head=4, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    return adapt(transformers.GPT2LMHeadModel(config).eval())


def wide_llama(width: int = D) -> Model:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
    )
    return adapt(transformers.LlamaForCausalLM(config).eval())


def zipf_texts(num_texts: int, seed: int) -> list[list[int]]:
    """10 to 16 tokens a text, as frequent as words are."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, VOCAB - 9)
    lengths = torch.randint(10, 17, (num_texts,), generator=generator).tolist()
    shuffled = torch.randperm(VOCAB - 10, generator=generator) + 10
    return [shuffled[torch.multinomial(weights, n, True, generator=generator)].tolist() for n in lengths]


def observe_batch(kind: str, width: int) -> tuple[Model, list[list[int]], GradientEvidence]:
    """About 1.5 times as many distinct prefixes as the width."""
    family, task = kind.split("-")
    model = wide_gpt2(width) if family == "gpt2" else wide_llama(width)
    texts = zipf_texts(width // 8, seed=16)
    assert len({tuple(text[:n]) for text in texts for n in range(1, len(text))}) > 1.25 * width
    return model, texts, unmask.observe_gradients(model, texts, task=task)


KINDS = ("gpt2-classification", "llama-next_token")


@pytest.fixture(scope="module", params=KINDS)
def narrow_batch(request):
    """Of half the width, which takes a fraction of the time."""
    return observe_batch(request.param, D // 2)


def assert_whole(model: Model, texts: list[list[int]], evidence: GradientEvidence) -> None:
    recovery = unmask.recover_text(evidence, model)
    assert recovery.status is unmask.Status.RECOVERED, recovery.reason
    assert sorted(recovery.value.expand()) == sorted(map(tuple, texts))
    assert all(text.certain for text in recovery.value.texts)
    assert recovery.certificate.details["rank"] > model.width  # the completed span is wider than the model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_beyond_a_larger_width(kind):
    assert_whole(*observe_batch(kind, D))


def test_every_text_beyond_the_width(narrow_batch):
    assert_whole(*narrow_batch)


def test_noise_is_never_completed(narrow_batch):
    model, _, evidence = narrow_batch
    generator = torch.Generator().manual_seed(5)
    noise = {
        name: torch.randn(g.shape, generator=generator) * g.norm() / g.numel() ** 0.5
        for name, g in evidence.gradients.items()
    }
    recovery = unmask.recover_text(replace(evidence, gradients=noise), model)
    assert recovery.status is not unmask.Status.RECOVERED
    assert not recovery.value.certain


@pytest.mark.parametrize("narrow_batch", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)], indirect=True)
def test_a_down_projection_of_noise_with_true_tokens_certifies_nothing(narrow_batch):
    """The token set is right, the layer that must verify prefixes is noise: guesses at most."""
    model, _, evidence = narrow_batch
    generator = torch.Generator().manual_seed(6)
    layer = wide_site(evidence, model).parameters[0]
    gradient = evidence.gradients[layer]
    noise = torch.randn(gradient.shape, generator=generator) * gradient.norm() / gradient.numel() ** 0.5
    recovery = unmask.recover_text(replace(evidence, gradients={**evidence.gradients, layer: noise}), model)
    assert recovery.status is not unmask.Status.RECOVERED
    assert not recovery.value.certain


@pytest.mark.slow
def test_too_many_tokens_end_as_a_bag_of_words_with_guesses():
    """b ≈ 3.5 d leaves the soft score nothing to go by; what is not verified is not claimed."""
    model, texts = wide_gpt2(), zipf_texts(36, seed=3)
    recovery = unmask.recover_text(unmask.observe_gradients(model, texts, task="classification"), model)
    assert recovery.status is unmask.Status.PARTIAL
    assert not recovery.value.certain
    assert recovery.value.token_set == {token for text in texts for token in text}


def test_rows_of_the_batch_depend_on_each_other_and_false_rows_take_part_in_nothing():
    """G = AᵀΔ with b = 60 rows of width 160 and rank 40: 30 true rows have 10 relations, 5 false rows none."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 160, generator=generator, dtype=torch.float64)
    span = column_span(rows.T @ torch.randn(60, 40, generator=generator, dtype=torch.float64))
    false = torch.randn(5, 160, generator=generator, dtype=torch.float64)
    found = dependencies(torch.cat([rows[:30], false]), span)
    assert span.rank == 40
    assert found.number == 30 - (60 - 40)
    assert found.verified.tolist() == [True] * 30 + [False] * 5


def test_too_few_rows_have_no_dependency():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 160, generator=generator, dtype=torch.float64)
    span = column_span(rows.T @ torch.randn(60, 40, generator=generator, dtype=torch.float64))
    assert dependencies(rows[:20], span).number == 0
