"""Sparse updates: how many entries are kept, which, and that they are kept exactly."""

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

from unmask.defences import keep_largest, keep_random
from unmask.errors import InputError

shares = st.floats(0, 1)
# Few values, so that many entries tie.
ties = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), max_size=8).map(torch.tensor)
).map(evidence_of)


def randomly(share, seed=0):
    return lambda evidence: keep_random(evidence, share, seeded(seed))


@quick
@given(st.one_of(updates, ties), shares)
def test_contract(evidence, share):
    check_contract(lambda e: keep_largest(e, share), evidence)
    check_contract(randomly(share), evidence)


@quick
@given(st.one_of(updates, ties), shares)
def test_kept_entries_are_exact_and_the_others_zero(evidence, share):
    before = flat(evidence)
    for after in (flat(keep_largest(evidence, share)), flat(randomly(share)(evidence))):
        assert ((after == before) | (after == 0)).all()


# The largest


@quick
@given(st.one_of(updates, ties), shares)
def test_the_largest_are_those_that_a_stable_sort_puts_first(evidence, share):
    before = flat(evidence)
    order = before.abs().argsort(descending=True, stable=True)
    expected = torch.zeros_like(before)
    kept = order[: round(share * len(before))]
    expected[kept] = before[kept]
    assert torch.equal(flat(keep_largest(evidence, share)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_share_is_exact(dtype, share):
    evidence = random_update(dtype=dtype)
    after = flat(keep_largest(evidence, share))
    assert int((after != 0).sum()) == round(share * len(after))


def test_of_ties_the_first_are_kept_by_name_and_then_by_position():
    evidence = evidence_of({"b": torch.tensor([1.0, -1.0, 3.0]), "a": torch.tensor([[1.0, 0.0], [-1.0, 1.0]])})
    after = keep_largest(evidence, 3 / 7)
    assert after.gradients["a"].tolist() == [[1.0, 0.0], [-1.0, 0.0]]
    assert after.gradients["b"].tolist() == [0.0, 0.0, 3.0]


def test_tensors_of_several_types_are_compared_exactly():
    """1 + 2⁻⁴⁰ is 1 in float32, and must still win against it."""
    evidence = evidence_of({"a": torch.ones(1), "b": torch.tensor([1 + 2.0**-40], dtype=torch.float64)})
    after = keep_largest(evidence, 0.5)
    assert flat(after).tolist() == [0.0, 1 + 2.0**-40]
    assert after.gradients["a"].dtype == torch.float32


# At random


def test_about_that_share_is_kept_and_not_scaled():
    evidence = evidence_of({"a": torch.ones(100_000)})
    after = flat(randomly(0.3)(evidence))
    assert set(after.tolist()) == {0.0, 1.0}
    # Five standard errors of √(0.3·0.7/100 000).
    assert float(after.mean()) == pytest.approx(0.3, abs=0.0073)


@quick
@given(updates, shares, shares)
def test_a_larger_share_keeps_what_a_smaller_one_keeps(evidence, one, other):
    small, large = (flat(randomly(share)(evidence)) for share in sorted((one, other)))
    assert ((small == 0) | (small == large)).all()


def test_the_same_seed_keeps_the_same_in_any_order_of_names():
    evidence = random_update()
    turned = replace(evidence, gradients=dict(reversed(evidence.gradients.items())))
    assert same(randomly(0.5)(evidence), randomly(0.5)(evidence))
    assert torch.equal(flat(randomly(0.5)(evidence)), flat(randomly(0.5)(turned)))
    assert not torch.equal(flat(randomly(0.5)(evidence)), flat(randomly(0.5, seed=1)(evidence)))


# Bounds


@quick
@given(updates)
def test_a_share_of_one_keeps_all_and_of_zero_nothing(evidence):
    for keep in (keep_largest, lambda e, share: keep_random(e, share, seeded())):
        assert same(keep(evidence, 1.0), evidence)
        assert not flat(keep(evidence, 0.0)).any()


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(InputError, match="share of entries to keep must be from 0 to 1, got"):
        keep_largest(random_update(), share)
    with pytest.raises(InputError, match="share of entries to keep must be from 0 to 1, got"):
        keep_random(random_update(), share, seeded())
