"""Noise: of the standard deviation that was asked for, the same for the same seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.updates import (
    DTYPES,
    check_contract,
    evidence_of,
    flat,
    quick,
    random_update,
    same,
    seeded,
    updates,
)

from unmask.defences import add_gaussian_noise, add_laplace_noise
from unmask.errors import InputError

NUM_ENTRIES = 200_000
each_noise = pytest.mark.parametrize("add_noise", [add_gaussian_noise, add_laplace_noise])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def wide_update(value: float = 3.0, dtype: torch.dtype = torch.float32):
    return evidence_of({"wte.weight": torch.full((NUM_ENTRIES,), value, dtype=dtype)})


@each_noise
@quick
@given(updates, st.floats(0, 1e6), st.booleans())
def test_contract(add_noise, evidence, sigma, relative):
    check_contract(lambda e: add_noise(e, sigma, seeded(), relative), evidence)


@each_noise
@each_dtype
def test_the_type_stays(add_noise, dtype):
    check_contract(lambda e: add_noise(e, 0.1, seeded()), random_update(dtype=dtype))


@each_noise
@pytest.mark.parametrize(("relative", "deviation"), [(False, 0.02), (True, 0.06)])
def test_the_deviation_is_what_was_asked_for(add_noise, relative, deviation):
    evidence = wide_update()
    noise = flat(add_noise(evidence, 0.02, seeded(), relative)) - 3.0
    # The deviation of 200 000 entries is known to 1/√(2·200 000) = 0.2 % (Laplace: 0.25 %), the mean to σ/450.
    assert float(noise.std()) == pytest.approx(deviation, rel=0.01)
    assert abs(float(noise.mean())) < deviation / 90


@pytest.mark.parametrize(
    ("add_noise", "kurtosis", "mean_size"),
    [(add_gaussian_noise, 3.0, math.sqrt(2 / math.pi)), (add_laplace_noise, 6.0, 1 / math.sqrt(2))],
)
def test_the_shape_of_the_distribution(add_noise, kurtosis, mean_size):
    noise = flat(add_noise(wide_update(0.0), 1.0, seeded()))
    # Four standard errors of 200 000 entries: of the fourth moment √(E ε⁸)/450, 10 for normal ones, 50 for Laplace's.
    assert float(noise.pow(4).mean()) == pytest.approx(kurtosis, rel=0.08)
    assert float(noise.abs().mean()) == pytest.approx(mean_size, rel=0.01)
    assert abs(float(noise.sign().mean())) < 4 / math.sqrt(NUM_ENTRIES)


@each_noise
def test_the_same_seed_gives_the_same_noise_in_any_order_of_names(add_noise):
    evidence = random_update()
    turned = replace(evidence, gradients=dict(reversed(evidence.gradients.items())))
    once = add_noise(evidence, 0.1, seeded(5))
    assert same(once, add_noise(evidence, 0.1, seeded(5)))
    assert torch.equal(flat(once), flat(add_noise(turned, 0.1, seeded(5))))
    assert not torch.equal(flat(once), flat(add_noise(evidence, 0.1, seeded(6))))


@each_noise
def test_the_noise_grows_with_sigma_and_stays_the_same_noise(add_noise):
    zero = evidence_of({"wte.weight": torch.zeros(50, dtype=torch.float64)})
    weak, strong = (flat(add_noise(zero, sigma, seeded())) for sigma in (1e-4, 1e-2))
    torch.testing.assert_close(strong, 100 * weak)


@each_noise
@each_dtype
@pytest.mark.parametrize("relative", [False, True])
def test_no_noise_changes_nothing(add_noise, dtype, relative):
    evidence = random_update(dtype=dtype)
    assert same(add_noise(evidence, 0.0, seeded(), relative), evidence)


@each_noise
def test_zeros_get_absolute_noise_but_no_relative_one(add_noise):
    zero = evidence_of({"wte.weight": torch.zeros(5, 4)})
    assert flat(add_noise(zero, 0.1, seeded())).all()
    assert same(add_noise(zero, 0.1, seeded(), relative=True), zero)


@each_noise
@pytest.mark.parametrize("relative", [False, True])
def test_a_tensor_without_entries_stays(add_noise, relative):
    empty = evidence_of({"wte.weight": torch.zeros(0, 4)})
    assert same(add_noise(empty, 0.1, seeded(), relative), empty)


@each_noise
@pytest.mark.parametrize("sigma", [-1e-9, math.inf, math.nan])
def test_a_level_that_is_none_is_refused(add_noise, sigma):
    with pytest.raises(InputError, match="sigma must be a finite number from 0 on, got"):
        add_noise(random_update(), sigma, seeded())


@each_noise
def test_noise_beyond_the_type_is_refused(add_noise):
    with pytest.raises(InputError, match="beyond 65504"):
        add_noise(random_update(dtype=torch.float16), 1e6, seeded())


@each_noise
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is missing")
def test_the_noise_is_the_same_on_cuda(add_noise):
    evidence = random_update()
    there = add_noise(evidence.to("cuda"), 0.1, seeded())
    assert all(tensor.is_cuda for tensor in there.gradients.values())
    assert same(there.to("cpu"), add_noise(evidence, 0.1, seeded()))
