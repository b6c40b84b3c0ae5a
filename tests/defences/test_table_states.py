"""Defences of updates on hidden states: a token's row is a tensor of its own, padding stays zero."""

from __future__ import annotations

import pytest
import torch

from unmask.defences import defend_states, parse_defence
from unmask.errors import InputError
from unmask.evidence import HiddenEvidence


@pytest.fixture
def evidence() -> HiddenEvidence:
    states = (
        torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10, 100, 5])[:, None]
    )
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    return HiddenEvidence(states * mask[..., None], mask, 1, "model")


def defended(evidence: HiddenEvidence, text: str, seed: int = 0) -> HiddenEvidence:
    return defend_states(evidence, parse_defence(text), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("text", ["noise:sigma=0.1", "int8", "fp8", "bf16", "random:share=0.5", "clip:norm=1"])
def test_real_tokens_change_and_padding_stays_zero(evidence, text):
    before = evidence.states.clone()
    after = defended(evidence, text)
    assert (after.states != evidence.states).any(2)[evidence.mask].all()
    assert not after.states[~evidence.mask].any()
    assert torch.equal(evidence.states, before)
    assert (after.layer, after.site, after.model_fingerprint) == (evidence.layer, evidence.site, "model")


def test_each_token_has_a_scale_of_its_own(evidence):
    after = defended(evidence, "int8")
    steps = evidence.states.abs().amax(2) / 127
    assert ((after.states - evidence.states).abs().amax(2) <= steps / 2 * 1.001).all()


def test_relative_noise_is_relative_to_each_token(evidence):
    errors = (defended(evidence, "noise:sigma=0.1,relative=true").states - evidence.states).norm(dim=2)
    shares = errors[evidence.mask] / evidence.states.norm(dim=2)[evidence.mask]
    assert ((shares > 0.06) & (shares < 0.14)).all()  # 64 coordinates: 9 % of 0.1, four times


def test_a_seed_gives_the_same_noise(evidence):
    assert torch.equal(defended(evidence, "noise:sigma=1", 3).states, defended(evidence, "noise:sigma=1", 3).states)


def test_states_have_no_names_to_withhold(evidence):
    with pytest.raises(InputError, match="no names"):
        defended(evidence, "withhold:pattern=wte")
