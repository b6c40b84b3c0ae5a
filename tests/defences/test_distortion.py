"""Distortion: numbers by hand, their relations, and no NaN at any edge."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.updates import copied, evidence_of, flat, quick, random_update, same, seeded, updates

from unmask.defences import (
    Distortion,
    add_gaussian_noise,
    clip_norm,
    keep_largest,
    measure_distortion,
    withhold,
)
from unmask.errors import InputError

ROUNDING = 1e-12  # sums of a few float64 products


def close(one: Distortion, *numbers: float) -> bool:
    return astuple(one) == pytest.approx(numbers, abs=ROUNDING)


def test_by_hand():
    before = evidence_of({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])})
    after = evidence_of({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([[0.0]])})
    assert close(measure_distortion(before, after), 9 / (5 * math.sqrt(10)), math.sqrt(10) / 5, math.sqrt(17) / 5, 0.5)


def test_of_known_defences():
    evidence = random_update()
    norm = float(flat(evidence).norm())
    clipped = measure_distortion(evidence, clip_norm(evidence, norm / 4))
    assert astuple(clipped) == pytest.approx((1, 0.25, 0.75, 1), abs=1e-7)  # entries are rounded to float32
    sparse = measure_distortion(evidence, keep_largest(evidence, 0.5))
    assert sparse.kept_share == 0.5
    # What is dropped is orthogonal to what is kept.
    assert sparse.cosine == pytest.approx(sparse.relative_norm)
    assert sparse.relative_norm**2 + sparse.relative_error**2 == pytest.approx(1)


def test_a_missing_tensor_counts_as_zero_on_either_side():
    evidence = random_update()
    part = withhold(evidence, ["wte"])
    zeroed = replace(evidence, gradients={**evidence.gradients, "wte.weight": torch.zeros(6, 4)})
    assert astuple(measure_distortion(evidence, part)) == astuple(measure_distortion(evidence, zeroed))
    assert astuple(measure_distortion(part, evidence)) == astuple(measure_distortion(zeroed, evidence))
    assert measure_distortion(part, evidence).kept_share == 1


@quick
@given(updates, updates)
def test_never_nan_and_within_bounds(one, other):
    shapes = {name: tensor.shape for name, tensor in one.gradients.items()}
    alike = {n: t for n, t in other.gradients.items() if n not in shapes or t.shape == shapes[n]}
    result = measure_distortion(one, replace(other, gradients=alike))
    assert not any(math.isnan(number) for number in astuple(result))
    assert -1 <= result.cosine <= 1
    assert result.relative_norm >= 0
    assert result.relative_error >= 0
    assert 0 <= result.kept_share <= 1


@quick
@given(updates)
def test_an_unchanged_update_is_undistorted(evidence):
    assert close(measure_distortion(evidence, copied(evidence)), 1, 1, 0, 1)


@quick
@given(st.integers(0, 5), st.floats(1e-3, 1e3))
def test_the_law_of_cosines(seed, sigma):
    evidence = random_update(seed, torch.float64)
    result = measure_distortion(evidence, add_gaussian_noise(evidence, sigma, seeded(seed + 1)))
    expected = 1 + result.relative_norm**2 - 2 * result.relative_norm * result.cosine
    assert result.relative_error**2 == pytest.approx(expected, rel=1e-9, abs=ROUNDING)


def test_zero_updates():
    zero, one = evidence_of({"a": torch.zeros(2)}), evidence_of({"a": torch.tensor([0.0, 2.0])})
    assert measure_distortion(zero, zero) == Distortion(1.0, 1.0, 0.0, 1.0)
    assert measure_distortion(zero, one) == Distortion(0.0, math.inf, math.inf, 1.0)
    assert measure_distortion(one, zero) == Distortion(0.0, 0.0, 1.0, 0.0)
    assert measure_distortion(evidence_of({}), evidence_of({})) == Distortion(1.0, 1.0, 0.0, 1.0)


def test_nothing_is_changed():
    before, after = random_update(), random_update(1)
    kept = copied(before), copied(after)
    measure_distortion(before, after)
    assert same(before, kept[0])
    assert same(after, kept[1])


def test_another_shape_is_refused():
    with pytest.raises(InputError, match=r"'a' had shape \(2,\) and now has \(1, 2\)"):
        measure_distortion(evidence_of({"a": torch.ones(2)}), evidence_of({"a": torch.ones(1, 2)}))
