import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.layers import EXACT, SINGLE

from unmask.attacks.queries.many_heads.sweep import find_crossings
from unmask.attacks.queries.resolution import NoPlane

FIRST, LAST = 0.1234, 0.1234 + math.pi


class Pieces:
    """A sinusoid to which another is added at every jump; how often it was asked."""

    def __init__(self, places, amounts, soft=0.0):
        self.places = torch.tensor(places, dtype=torch.float64)
        self.amounts = torch.tensor(amounts, dtype=torch.float64)
        self.soft, self.num_asked = soft, 0

    def __call__(self, angles):
        self.num_asked += len(angles)
        since = angles[:, None] - self.places
        share = since.gt(0).double() if self.soft == 0 else (since / self.soft).sigmoid()
        # cos(θ − place) is 1 where it begins, so the jump is the amount.
        return (angles - 0.7).cos() + (share * since.cos()) @ self.amounts


@st.composite
def jumps(draw, least_gap=1e-3):
    """Places in the half turn that keep a gap, and an amount for each: of one sign, so that none hides another."""
    num = draw(st.integers(1, 8))
    free = (LAST - FIRST) - (num + 1) * least_gap
    cuts = sorted(draw(st.lists(st.floats(0, 1), min_size=num, max_size=num)))
    places = [FIRST + (place + 1) * least_gap + cut * free for place, cut in enumerate(cuts)]
    sizes = draw(st.lists(st.floats(0.05, 3), min_size=num, max_size=num))
    sign = draw(st.sampled_from([-1, 1]))
    return places, [sign * size for size in sizes]


@pytest.mark.parametrize("resolution", [EXACT, SINGLE], ids=["float64", "float32"])
@settings(max_examples=30)
@given(jumps())
def test_every_jump_is_found_where_it_is(resolution, case):
    g = Pieces(*case)
    found = find_crossings(g, resolution)
    assert len(found) == len(case[0])
    assert torch.allclose(found, g.places, rtol=0, atol=resolution.angle)


@pytest.mark.parametrize("num_jumps", [0, 1, 5, 20])
def test_the_cost_is_that_of_halving(num_jumps):
    g = Pieces(torch.linspace(0.3, 3.1, num_jumps).tolist(), [0.5] * num_jumps)
    assert len(find_crossings(g, EXACT)) == num_jumps
    # Both halves of an arc are tested at two points each.
    halvings = math.ceil(math.log2(math.pi / 32 / EXACT.angle))
    assert g.num_asked <= 33 + 64 + 4 * halvings * num_jumps


def test_jumps_that_cancel_are_seen_where_an_arc_end_lies_between():
    places = torch.linspace(0.3, 3.1, 16).tolist()  # an arc is π/32 wide
    assert len(find_crossings(Pieces(places, [0.5, -0.5] * 8), EXACT)) == 16
    assert len(find_crossings(Pieces([FIRST + 1e-3, FIRST + 2e-3], [0.5, -0.5]), SINGLE)) == 0


def test_nothing_jumps_in_one_sinusoid():
    assert len(find_crossings(Pieces([1.0], [0.0]), EXACT)) == 0


def test_jumps_closer_than_the_resolution_are_one():
    assert len(find_crossings(Pieces([1.0, 1.0 + EXACT.angle / 3], [0.5, 0.6]), EXACT)) == 1


def test_a_head_that_changes_too_slowly_is_refused():
    with pytest.raises(NoPlane, match="too slowly"):
        find_crossings(Pieces([1.0], [0.5], soft=30 * EXACT.angle), EXACT)


def test_a_chain_of_close_jumps_is_refused():
    places = [1.0 + 1.5 * EXACT.angle * k for k in range(8)]
    with pytest.raises(NoPlane, match="too close"):
        find_crossings(Pieces(places, [0.5] * 8), EXACT)


@pytest.mark.parametrize("noise", [1e-6, 1.0])
def test_noise_is_no_sinusoid(noise):
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(NoPlane, match="not sinusoids in pieces"):
        find_crossings(lambda angles: angles.cos() + noise * torch.randn(len(angles), generator=generator), EXACT)
