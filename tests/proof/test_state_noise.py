"""Rounding is read off the values; another precision's error is measured."""

from __future__ import annotations

import pytest
import torch

from unmask.proof.state_noise import computing_error, measure_rounding

STATES = 30 * torch.randn(6, 512, generator=torch.Generator().manual_seed(0))


def int8(states: torch.Tensor) -> torch.Tensor:
    step = states.abs().amax(1, keepdim=True) / 127
    return (states / step).round() * step


def int4(states: torch.Tensor) -> torch.Tensor:
    step = states.abs().amax(1, keepdim=True) / 7
    return (states / step).round() * step


def float8(states: torch.Tensor) -> torch.Tensor:
    scale = states.abs().amax(1, keepdim=True) / 448
    return (states / scale).to(torch.float8_e4m3fn).float() * scale


def bfloat16(states: torch.Tensor) -> torch.Tensor:
    return states.bfloat16().float()


@pytest.mark.parametrize("coarse", [bfloat16, float8, int8, int4])
def test_the_tolerance_holds_the_rounding_and_little_more(coarse):
    stored = coarse(STATES)
    noise = measure_rounding(stored, computing_error=0.0)
    errors = (stored - STATES).norm(dim=1) / STATES.norm(dim=1)
    assert (errors < noise.tolerances).all()
    assert (noise.tolerances < 4 * errors + 2e-4).all()


def test_ordinary_floats_have_no_noise():
    noise = measure_rounding(STATES, computing_error=0.0)
    assert not noise.variances.any()
    assert float(noise.tolerances.max()) == pytest.approx(1e-4)


def test_float64_is_held_to_more_digits():
    assert float(measure_rounding(STATES.double(), 0.0).tolerances.max()) < 1e-8


def test_an_error_of_computing_widens_the_tolerance():
    assert float(measure_rounding(STATES, computing_error=0.02).tolerances.min()) > 0.02


def test_the_error_of_bfloat16_is_measured(tiny_llama):
    assert computing_error(tiny_llama, torch.float32, 2) == 0
    assert 1e-3 < computing_error(tiny_llama, torch.bfloat16, 2) < 0.2
