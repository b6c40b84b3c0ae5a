"""Kinks of piecewise sinusoids: all of them, where they are, and no others."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.attacks.queries.networks.kinks import TooManyKinks, find_kinks, fit_sinusoid

NOISE = 1e-14  # some tens of roundings of values of the order of 1


class Bent:
    """Σ_j s_j·|sin(θ − θ_j)|, whose kinks are the θ_j."""

    def __init__(self, kinks, sizes):
        self.kinks, self.sizes = (torch.as_tensor(values, dtype=torch.float64) for values in (kinks, sizes))
        self.num_asked = 0

    def __call__(self, angle):
        self.num_asked += len(angle)
        return (angle[:, None] - self.kinks).sin().abs() @ self.sizes + 0.3 * angle.cos()


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(0, 40))
def test_every_kink_is_found_where_it_is(seed, count):
    generator = torch.Generator().manual_seed(seed)
    kinks = (math.pi * torch.rand(count, generator=generator, dtype=torch.float64)).sort().values
    sizes = torch.randn(count, generator=generator, dtype=torch.float64)
    sizes = sizes.sign() * (sizes.abs() + 0.1)
    found = find_kinks(Bent(kinks, sizes), 0.0, math.pi, NOISE, 100)
    ends = (kinks < 1e-6) | (kinks > math.pi - 1e-6)  # at the very ends one side cannot be seen
    apart = kinks.diff().min() if count > 1 else 1.0
    if apart > 1e-6 and not ends.any():
        assert len(found) == count
        # A kink is an intersection of lines known to 1e-14 over a twelfth of an interval.
        assert torch.allclose(found, kinks, atol=1e-8)


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, -0.9), (1.0, -1.0)])
def test_close_kinks_are_not_taken_for_one(gap, sizes):
    found = find_kinks(Bent([1.0, 1.0 + gap], sizes), 0.0, math.pi, NOISE, 100)
    assert len(found) == 2
    assert abs(float(found[1] - found[0]) - gap) < 1e-3 * gap + 1e-9


def test_a_sinusoid_has_none_and_costs_two_queries_an_interval():
    bent = Bent([], [])
    assert len(find_kinks(bent, 0.0, math.pi, NOISE, 100)) == 0
    assert bent.num_asked == 17 + 2 * 16


def test_a_kink_that_is_alone_costs_four_queries_more():
    bent = Bent([1.0], [1.0])
    assert len(find_kinks(bent, 0.0, math.pi, NOISE, 100)) == 1
    assert bent.num_asked == 17 + 2 * 16 + 4


def test_a_function_that_bends_everywhere_is_given_up_early():
    with pytest.raises(TooManyKinks, match="more than 200 kinks"):
        find_kinks(lambda angle: (3 * angle).sin(), 0.0, math.pi, NOISE, 200)


def test_sinusoids_of_narrow_intervals_keep_their_digits():
    start = torch.tensor([1.0], dtype=torch.float64)
    end = start + 1e-9
    wave = fit_sinusoid(start, start.sin() + 2 * start.cos(), end, end.sin() + 2 * end.cos())
    middle = (start + end) / 2
    assert abs(float(wave(middle) - middle.sin() - 2 * middle.cos())) < 1e-15
    assert torch.allclose(wave.move_origin(end)(middle), wave(middle), rtol=1e-12)
