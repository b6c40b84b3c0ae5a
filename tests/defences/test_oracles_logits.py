"""Defences of logits: what rounding and noise do to them, and which defences have no meaning there."""

from __future__ import annotations

import pytest
import torch

from unmask.defences.oracles import ORACLE_DEFENCES, defend_logits, parse_oracle_defence
from unmask.errors import InputError

TOKENS = torch.arange(6).reshape(2, 3)


def logits(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.double().sin().sum(1, keepdim=True) * torch.linspace(1, 2, 5).double()


def test_rounded():
    shown = defend_logits(logits, parse_oracle_defence("round:decimals=2"))(TOKENS)
    assert torch.equal(shown, logits(TOKENS).round(decimals=2))
    assert not torch.equal(shown, logits(TOKENS))


def test_noise_is_new_each_time_and_the_same_again():
    first, second = (defend_logits(logits, parse_oracle_defence("noise:sigma=0.1,seed=3")) for _ in range(2))
    answers = [first(TOKENS), first(TOKENS)]
    assert not torch.equal(*answers)
    assert torch.equal(answers[0], second(TOKENS))
    noise = torch.stack([first(TOKENS) - logits(TOKENS) for _ in range(500)])
    assert float(noise.std()) == pytest.approx(0.1, rel=0.1)  # 5,000 numbers: 1 % of standard error


def test_low_precision_is_answered_in_double():
    shown = defend_logits(lambda tokens: logits(tokens).bfloat16(), parse_oracle_defence("round:decimals=1"))(TOKENS)
    assert shown.dtype == torch.float64


@pytest.mark.parametrize("name", sorted(set(ORACLE_DEFENCES) - {"round", "noise"}))
def test_what_does_not_apply_to_logits_is_refused_at_once(name):
    with pytest.raises(InputError, match=f"'{name}.*does not apply to logits; 'round' and 'noise' do"):
        defend_logits(logits, parse_oracle_defence(ORACLE_DEFENCES[name].example))
