"""An encoder's first attention module: all tokens from one span a head, and silence on noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.sampling import sample

from unmask.attacks.outputs.first_attention.attack import FirstAttentionAttack
from unmask.attacks.outputs.first_attention.encoder import nearest_tokens, weighted_complements
from unmask.evidence import HiddenEvidence, Site
from unmask.models import Model
from unmask.models.output_projection import OutputProjection
from unmask.recovery import Status

TEXT = [1, 17, 99, 17, 250, 8, 8, 400, 2]
SENTENCE = "The spare key lies under the pot beside the old green door, and the code of the alarm is 4711."


@torch.no_grad()
def observed(model: Model, tokens: list[int], dtype: torch.dtype) -> HiddenEvidence:
    client = model.to(dtype=torch.float64) if dtype is torch.float64 else model
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mixed = client.mixed_values(0, client.embed(ids, positions), positions, mask)
    return HiddenEvidence(OutputProjection.of(client, 0)(mixed).to(dtype), mask, 0, model.fingerprint(), Site.ATTENTION)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_exact_tokens_with_repetitions(tiny_bert, dtype):
    recovery = FirstAttentionAttack()(observed(tiny_bert, TEXT, dtype), tiny_bert)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert [text.tokens for text in recovery.value.certain] == [tuple(TEXT)]
    assert recovery.certificate.holds


def test_span_test_names_the_tokens_alone(tiny_bert):
    """The theorem: a head's rows span the values of its tokens; no forward pass is run."""
    model = tiny_bert.to(dtype=torch.float64)
    rows = observed(tiny_bert, TEXT, torch.float64).states[0]
    mixed = OutputProjection.of(model, 0).invert(rows)
    heads = mixed.unflatten(1, (model.num_heads, model.head_width)).transpose(0, 1)
    with torch.no_grad():
        best, _ = nearest_tokens(model, weighted_complements(heads), range(len(TEXT)))
    assert best.tolist() == TEXT


def test_texts_as_long_as_a_head_is_wide_are_left_alone(tiny_bert):
    tokens = list(range(5, 5 + tiny_bert.head_width))
    recovery = FirstAttentionAttack()(observed(tiny_bert, tokens, torch.float64), tiny_bert)
    assert recovery.status is Status.NOTHING_FOUND
    assert "shorter" in recovery.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_noise_is_not_recovered(tiny_bert, dtype):
    evidence = observed(tiny_bert, TEXT, dtype)
    noise = torch.randn(evidence.states.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise = noise * evidence.states.norm() / noise.norm()
    recovery = FirstAttentionAttack()(replace(evidence, states=noise), tiny_bert)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.certificate.holds


@sample("dtype", [torch.float64, torch.float32], [torch.float32])
def test_real_weights(minilm, dtype):
    tokens = minilm.encode(SENTENCE)
    recovery = FirstAttentionAttack()(observed(minilm, tokens, dtype), minilm)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert [text.tokens for text in recovery.value.certain] == [tuple(tokens)]


def test_bfloat16_claims_nothing_that_is_wrong(minilm):
    tokens = minilm.encode("The spare key lies under the pot.")
    recovery = FirstAttentionAttack()(observed(minilm, tokens, torch.bfloat16), minilm)
    assert recovery.status is Status.NOTHING_FOUND or recovery.value.texts[0].tokens == tuple(tokens)
