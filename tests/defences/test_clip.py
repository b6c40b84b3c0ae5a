"""Clipping: a norm that is not exceeded, a direction that stays."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.updates import DTYPES, check_contract, evidence_of, flat, quick, random_update, same, updates

from unmask.defences import clip_norm
from unmask.errors import InputError

norms = st.floats(1e-3, 1e6)


@quick
@given(updates, norms)
def test_contract(evidence, max_norm):
    check_contract(lambda e: clip_norm(e, max_norm), evidence)


@quick
@given(updates, norms)
def test_the_norm_is_at_most_that(evidence, max_norm):
    # Each entry of float32 is rounded by 6e-8 of itself.
    assert float(flat(clip_norm(evidence, max_norm)).norm()) <= max_norm * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_and_the_direction_stays(dtype):
    evidence = random_update(dtype=dtype)
    before, after = flat(evidence), flat(clip_norm(evidence, 0.5))
    # The factor, each product and, in float64, this comparison round by half a unit in the last place.
    precision = 3 * torch.finfo(dtype).eps
    assert float(after.norm()) == pytest.approx(0.5, rel=precision)
    assert float((after / 0.5 - before / before.norm()).norm()) <= precision


def test_one_factor_holds_for_all_tensors():
    evidence = evidence_of({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    assert flat(clip_norm(evidence, 1.0)).tolist() == pytest.approx([0.6, 0.8], rel=1e-7)


def test_what_is_short_enough_stays_as_it_is():
    evidence = evidence_of({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    assert same(clip_norm(evidence, 5.0), evidence)
    assert same(clip_norm(clip_norm(evidence, 0.1), 0.2), clip_norm(evidence, 0.1))


@pytest.mark.parametrize("gradients", [{}, {"a": torch.zeros(3)}, {"a": torch.zeros(0)}])
def test_nothing_stays_nothing(gradients):
    evidence = evidence_of(gradients)
    assert same(clip_norm(evidence, 1e-6), evidence)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.inf, math.nan])
def test_a_norm_that_is_none_is_refused(max_norm):
    with pytest.raises(InputError, match="max_norm must be a finite number above 0, got"):
        clip_norm(random_update(), max_norm)
