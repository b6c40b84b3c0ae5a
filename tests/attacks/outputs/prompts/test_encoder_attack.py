"""Texts from an encoder's states: exact where all states agree, and silence on noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask.attacks.outputs.prompts.encoder_attack import EncoderPromptAttack
from unmask.evidence.outputs import Site
from unmask.protocols.hidden import observe_hidden
from unmask.recovery import Status

TEXTS = [[1, 17, 99, 17, 250, 8, 8, 400, 2], [5, 77, 320, 41], [9]]
SENTENCES = [
    "The spare key lies under the pot beside the old green door.",
    "My sister quietly sold the summer house near the lake.",
]


def test_embeddings_prove_tokens_and_no_text(tiny_bert):
    """Rows of two texts one behind the other used to be RECOVERED, certain and wrong."""
    evidence = observe_hidden(tiny_bert, [[1, 17, 99, 2], [5, 77, 320, 41], [9]], layer=0)
    spliced = evidence.states.clone()
    spliced[0, 2:] = evidence.states[1, 2:]
    for states, first in ((evidence.states, (1, 17, 99, 2)), (spliced, (1, 17, 320, 41))):
        recovery = EncoderPromptAttack()(replace(evidence, states=states), tiny_bert)
        assert recovery.status is Status.PARTIAL
        assert [text.tokens for text in recovery.value.certain] == [(9,)]  # nothing to bind
        assert {text.tokens for text in recovery.value.texts} == {first, (5, 77, 320, 41), (9,)}
        assert "is taken from the dump" in recovery.reason


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_exact_texts(tiny_bert, layer):
    recovery = EncoderPromptAttack()(observe_hidden(tiny_bert, TEXTS, layer=layer), tiny_bert)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert sorted(text.tokens for text in recovery.value.certain) == sorted(map(tuple, TEXTS))
    assert recovery.certificate.holds
    assert recovery.certificate.rejected > 100 * recovery.certificate.residual
    assert recovery.value.token_set == {token for text in TEXTS for token in text}


def test_padding_on_the_left_moves_positions(tiny_bert):
    evidence = observe_hidden(tiny_bert, TEXTS[:2], layer=1, padding_side="left")
    recovery = EncoderPromptAttack()(evidence, tiny_bert)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert sorted(text.tokens for text in recovery.value.certain) == sorted(map(tuple, TEXTS[:2]))


def test_evidence_is_left_alone_and_the_same_result_comes_twice(tiny_bert):
    evidence = observe_hidden(tiny_bert, TEXTS, layer=2)
    before = evidence.states.clone()
    first, second = EncoderPromptAttack()(evidence, tiny_bert), EncoderPromptAttack()(evidence, tiny_bert)
    assert torch.equal(evidence.states, before)
    assert (first.value, first.status, first.certificate) == (second.value, second.status, second.certificate)


@pytest.mark.parametrize("layer", [0, 3])
def test_noise_is_not_recovered(tiny_bert, layer):
    evidence = observe_hidden(tiny_bert, TEXTS, layer=layer)
    noise = torch.randn(evidence.states.shape, generator=torch.Generator().manual_seed(0)) * evidence.mask[..., None]
    noise = noise * evidence.states.norm() / noise.norm()
    recovery = EncoderPromptAttack(max_texts=400)(replace(evidence, states=noise), tiny_bert)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.certificate.holds
    assert not recovery.value.token_set
    assert not recovery.value.certain


def test_one_strange_state_leaves_a_text_uncertain(tiny_bert):
    evidence = observe_hidden(tiny_bert, TEXTS[:2], layer=2)
    states = evidence.states.clone()
    states[0, 3] = torch.randn(states.shape[2], generator=torch.Generator().manual_seed(1))
    recovery = EncoderPromptAttack(max_texts=400)(replace(evidence, states=states), tiny_bert)
    assert recovery.status is Status.PARTIAL
    assert [text.tokens for text in recovery.value.certain] == [tuple(TEXTS[1])]
    assert recovery.value.token_set == set(TEXTS[1])


def test_the_budget_is_kept(tiny_bert):
    evidence = observe_hidden(tiny_bert, TEXTS[:1], layer=3)
    noise = replace(evidence, states=torch.randn(evidence.states.shape, generator=torch.Generator().manual_seed(0)))
    attack = EncoderPromptAttack(positions=2, candidates=4, max_texts=50)
    assert attack(noise, tiny_bert).cost.forward_passes <= 50 + 2 * (256 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_coarse_storage_is_allowed_for(tiny_bert, dtype):
    evidence = observe_hidden(tiny_bert, TEXTS[:2], layer=2)
    recovery = EncoderPromptAttack()(replace(evidence, states=evidence.states.to(dtype)), tiny_bert)
    assert all(text.tokens in map(tuple, TEXTS) for text in recovery.value.certain)
    assert recovery.status is Status.RECOVERED, recovery.reason


def test_pairs_are_out_of_scope_and_never_certain(tiny_bert):
    tokens, types = torch.tensor([TEXTS[0]]), torch.tensor([[0] * 5 + [1] * 4])
    with torch.no_grad():
        states = tiny_bert.hidden_states(tokens, num_blocks=1, types=types)[1]
    evidence = replace(observe_hidden(tiny_bert, TEXTS[:1], layer=1), states=states)
    recovery = EncoderPromptAttack(max_texts=400)(evidence, tiny_bert)
    assert recovery.status is Status.NOTHING_FOUND
    assert "pairs" in recovery.reason


def test_other_evidence_is_refused(tiny_bert, tiny_gpt2):
    causal = observe_hidden(tiny_gpt2, [[1, 2, 3]], layer=1)
    assert EncoderPromptAttack()(causal, tiny_gpt2).status is Status.NOT_APPLICABLE
    mean = observe_hidden(tiny_bert, [[1, 2, 3]], layer=1, site=Site.MEAN)
    assert EncoderPromptAttack()(mean, tiny_bert).status is Status.NOT_APPLICABLE


@pytest.mark.slow
@pytest.mark.parametrize("layer", [1, 4])
def test_real_weights(minilm, layer):
    recovery = EncoderPromptAttack()(observe_hidden(minilm, SENTENCES, layer=layer), minilm)
    assert recovery.status is Status.RECOVERED, recovery.reason
    expected = sorted(tuple(minilm.encode(sentence)) for sentence in SENTENCES)
    assert sorted(text.tokens for text in recovery.value.certain) == expected


@pytest.mark.slow
def test_real_weights_last_layer(minilm):
    """What sentence embeddings are averaged from; what is certain is right."""
    evidence = observe_hidden(minilm, SENTENCES, site=Site.FINAL_NORM)
    recovery = EncoderPromptAttack(max_texts=1000)(evidence, minilm)
    assert recovery.status.conclusive, recovery.reason
    expected = {tuple(minilm.encode(sentence)) for sentence in SENTENCES}
    assert {text.tokens for text in recovery.value.certain} <= expected
