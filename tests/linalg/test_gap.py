"""The widest gap: where it lies, that nothing lies in it, and that more distances only narrow it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.linalg.gap import Gap, widest_gap

PRECISION = 1e-7  # distances below are 'zero': rows are computed in float32
quick = settings(max_examples=60)
# Distances between the precision and the ceiling, and zeros of every size.
distances = st.lists(st.floats(0.0, 2.0), max_size=12)
gaps = st.tuples(st.floats(1e-12, 0.1), st.floats(0.1, 1.0)).map(lambda ends: Gap(*ends))


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_gap_by_hand():
    gap = widest_gap(tensor([1e-6, 0.3, 2e-6, 0.2, 5.0]), ceiling=0.5)
    assert (gap.accepted, gap.rejected) == (2e-6, 0.2)
    assert gap.decades == pytest.approx(5)
    assert gap.threshold == pytest.approx(math.sqrt(2e-6 * 0.2))


def test_without_distances_the_gap_reaches_from_zero_to_the_ceiling():
    assert widest_gap(tensor([]), ceiling=0.5) == Gap(0.0, 0.5)


def test_a_single_distance_is_told_from_the_ceiling():
    gap = widest_gap(tensor([1e-6]), ceiling=0.5)
    assert gap.accepted <= 1e-6 < gap.threshold < gap.rejected == 0.5


def test_distances_below_the_precision_are_one_zero():
    """1e-16 and 1e-9 are both rounding, so the seven decades between them are no gap."""
    gap = widest_gap(tensor([1e-16, 1e-9, 1e-3]), ceiling=0.5)
    assert gap.rejected == 1e-3
    assert gap.threshold > 1e-9
    assert gap.decades == pytest.approx(4)


def test_nothing_passes_when_every_distance_exceeds_the_ceiling():
    values = tensor([0.7, 0.9])
    gap = widest_gap(values, ceiling=0.5)
    assert gap.decades <= 0
    assert not (values <= gap.threshold).any()


@pytest.mark.parametrize("values", [[], [1e-5], [0.2, 0.5, 4.0], [1e-5, 0.2]])
def test_distances_outside_leave_the_gap_where_it_was(values):
    gap = Gap(1e-5, 0.2)
    assert gap.narrow(tensor(values)) == gap


@quick
@given(distances, st.floats(0.01, 1.0))
def test_no_distance_lies_inside_the_widest_gap(values, ceiling):
    gap = widest_gap(tensor(values), ceiling)
    assert not any(max(gap.accepted, PRECISION) < value < gap.rejected for value in values)


@quick
@given(distances, st.floats(0.01, 1.0))
def test_no_two_neighbours_are_further_apart(values, ceiling):
    gap = widest_gap(tensor(values), ceiling)
    ladder = sorted({max(value, PRECISION) for value in values if value < ceiling} | {ceiling})
    falls = [math.log10(high / low) for low, high in pairwise(ladder)]
    # Logarithms are rounded, at most 7 decades of them.
    assert gap.decades >= max(falls, default=-math.inf) - 1e-12


@quick
@given(distances, st.floats(0.01, 1.0), st.randoms(use_true_random=False))
def test_the_order_of_distances_does_not_matter(values, ceiling, random):
    mixed = random.sample(values, len(values))
    assert widest_gap(tensor(mixed), ceiling) == widest_gap(tensor(values), ceiling)


@quick
@given(gaps, distances)
def test_narrowing_leaves_no_distance_inside(gap, values):
    narrowed = gap.narrow(tensor(values))
    assert narrowed.accepted <= narrowed.rejected <= gap.rejected
    assert not any(max(narrowed.accepted, PRECISION) < value < narrowed.rejected for value in values)


@quick
@given(gaps, distances)
def test_narrowing_twice_by_the_same_distances_changes_nothing(gap, values):
    once = gap.narrow(tensor(values))
    again = once.narrow(tensor(values))
    assert again.decades == pytest.approx(once.decades, abs=1e-12)  # a sum of two rounded logarithms
    assert again.rejected == once.rejected


@quick
@given(gaps)
def test_the_threshold_parts_accepted_from_rejected(gap):
    assert gap.threshold <= gap.rejected
    assert gap.threshold >= max(gap.accepted, PRECISION) * (1 - 1e-15)  # the root of a square is rounded
    # Half of the decades lie on each side.
    assert math.log10(gap.rejected / gap.threshold) == pytest.approx(gap.decades / 2, abs=1e-12)


def test_float32_distances_are_compared_in_float64():
    gap = widest_gap(torch.tensor([1e-6, 0.25]), ceiling=0.5)
    assert gap.rejected == 0.25
    assert gap.accepted == pytest.approx(1e-6, rel=1e-7)  # half a unit of float32's precision


def test_distances_are_not_changed():
    values = tensor([0.3, 1e-9, 0.1])
    before = values.clone()
    widest_gap(values, ceiling=0.5)
    assert torch.equal(values, before)


@quick
@given(distances, distances, st.floats(0.01, 1.0))
def test_the_order_of_what_is_seen_does_not_matter(first, second, ceiling):
    gap = widest_gap(tensor([0.0]), ceiling)
    one = gap.narrow(tensor(first)).narrow(tensor(second))
    other = gap.narrow(tensor(second)).narrow(tensor(first))
    assert one == other


def test_a_gap_in_words():
    assert Gap(1e-6, 3e-6).describe() == "have a gap of only 0.5 decades"
    for rejected in (1e-6, 0.5e-6):
        assert Gap(1e-6, rejected).describe() == "are as small for what is refused as for what is accepted"
