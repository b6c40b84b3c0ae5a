"""Bags of tokens from means: exact for sums of embeddings, a guess elsewhere, silence on noise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from unmask.attacks.outputs.vectors.pooled import PooledAttack
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models import Model
from unmask.protocols.hidden import observe_hidden
from unmask.recovery import Status

BAG = [7, 99, 7, 250, 8, 8, 400, 7, 31]
LETTER = "The spare key lies under the pot beside the old green door, and the code of the alarm is 4711."


def pooled(model: Model, texts: list, layer: int = 0) -> HiddenEvidence:
    return observe_hidden(model, texts, layer=layer, site=Site.MEAN)


def test_a_mean_of_embeddings_gives_the_bag(tiny_llama):
    recovery = PooledAttack()(pooled(tiny_llama, [BAG]), tiny_llama)
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert recovery.value.token_set == set(BAG)
    assert recovery.certificate.holds
    assert recovery.certificate.rejected > 3 * recovery.certificate.tolerance


def test_counts_are_whole_and_order_is_not_claimed(tiny_llama):
    recovery = PooledAttack()(pooled(tiny_llama, [BAG]), tiny_llama)
    (text,) = recovery.value.texts
    assert Counter(text.tokens) == Counter(BAG)
    assert not text.certain


def test_the_least_counts_that_fit_are_given(tiny_llama):
    """A mean does not tell 'a b' from 'a b a b'."""
    once, twice = (PooledAttack()(pooled(tiny_llama, [text]), tiny_llama) for text in ([5, 6], [5, 6, 5, 6]))
    assert [text.tokens for text in once.value.texts] == [text.tokens for text in twice.value.texts]
    assert "common factor" in twice.reason


def test_added_positions_are_subtracted(tiny_gpt2):
    recovery = PooledAttack(max_length_with_positions=12)(pooled(tiny_gpt2, [BAG]), tiny_gpt2)
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert recovery.value.token_set == set(BAG)
    assert Counter(recovery.value.texts[0].tokens) == Counter(BAG)


def test_a_norm_behind_the_embeddings_leaves_a_guess(tiny_bert):
    recovery = PooledAttack()(pooled(tiny_bert, [BAG]), tiny_bert)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.value.token_set
    assert not any(text.certain for text in recovery.value.texts)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2", "tiny_bert"])
def test_deeper_layers_claim_nothing(request, name):
    model = request.getfixturevalue(name)
    recovery = PooledAttack()(pooled(model, [BAG], layer=2), model)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.value.token_set
    assert "guesses" in recovery.reason


def test_a_guess_is_no_longer_than_the_model_takes(tiny_gpt2, monkeypatch):
    """A clipped mean used to be explained by 4e8 tokens, one behind the other."""
    decode = tiny_gpt2.decode
    monkeypatch.setattr(Model, "decode", lambda _, tokens: decode(tokens[:100]))
    evidence = pooled(tiny_gpt2, [[5]])
    for norm in (1.0, 1e-3, 1e-30):
        recovery = PooledAttack()(replace(evidence, states=evidence.states * norm / evidence.states.norm()), tiny_gpt2)
        assert recovery.status is Status.NOTHING_FOUND
        assert not recovery.looked_for
        assert all(len(text.tokens) <= tiny_gpt2.max_positions for text in recovery.value.texts)
    assert "explains the state" in recovery.reason


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_never_a_bag(request, name, seed):
    model = request.getfixturevalue(name)
    evidence = pooled(model, [BAG])
    noise = torch.randn(evidence.states.shape, generator=torch.Generator().manual_seed(seed))
    noise = noise * evidence.states.norm() / noise.norm()
    recovery = PooledAttack(max_length_with_positions=8)(replace(evidence, states=noise), model)
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.certificate.holds


def test_a_weighted_sum_that_is_no_mean_is_refused(tiny_llama):
    """The right tokens with shares that no whole counts have."""
    tokens = torch.tensor([5, 6, 7])
    with torch.no_grad():
        rows = tiny_llama.embed(tokens, torch.zeros_like(tokens))
    evidence = pooled(tiny_llama, [tokens.tolist()])
    shares = torch.tensor([2**0.5, 3**0.5, 5**0.5])
    sums = (shares / shares.sum()) @ rows
    attack = PooledAttack(max_length=64)
    assert attack(replace(evidence, states=sums[None, None]), tiny_llama).status is Status.NOTHING_FOUND


def test_states_of_every_position_are_refused(tiny_llama):
    assert PooledAttack()(observe_hidden(tiny_llama, [BAG], layer=0), tiny_llama).status is Status.NOT_APPLICABLE


def test_real_weights(smollm2):
    tokens = smollm2.encode(LETTER)
    recovery = PooledAttack()(pooled(smollm2, [LETTER]), smollm2)
    assert recovery.status is Status.PARTIAL, recovery.reason
    assert recovery.value.token_set == set(tokens)
    assert Counter(recovery.value.texts[0].tokens) == Counter(tokens)
