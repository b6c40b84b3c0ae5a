import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.layers import pairs_of, two_token_signal, vector_layer
from tests.attacks.queries.random_heads import oracle_of, random_head, rounded
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.pairs import Pairs, logit
from unmask.attacks.queries.resolution import NoPlane
from unmask.evidence.oracles import FunctionOracle, OracleEvidence

WIDTH = 6
HEADS = random_head(WIDTH, num_heads=3)
U, Y = normal(1)(40, WIDTH), normal(2)(WIDTH)


def test_section_4_two_tokens_show_every_head_by_its_share():
    """F(u, y) = f([y + u; y]) − f([y]) = Σ_h (v_hᵀu)·σ(uᵀW_h y)"""
    assert relative(pairs_of(HEADS)(U, Y), two_token_signal(HEADS, U, Y)) < 1e-13


def test_every_row_may_have_its_own_y():
    many = normal(3)(40, WIDTH)
    rows = torch.cat([two_token_signal(HEADS, u[None], y) for u, y in zip(U, many, strict=True)])
    assert relative(pairs_of(HEADS)(U, many), rows) < 1e-13


@settings(max_examples=40)
@given(st.floats(-3, 6), st.integers(0, 99))
def test_the_boost_changes_no_answer(exponent, seed):
    u, y = normal(seed)(10, WIDTH), normal(seed + 1)(WIDTH)
    boosted, plain = (pairs_of(HEADS, boost)(u, y) for boost in (10.0**exponent, 1.0))
    # A short first token loses digits: y/R is taken away from an answer that it makes 1/R² times larger.
    assert relative(boosted, plain) < 1e-12 * max(1.0, 10.0 ** (-2 * exponent))


def test_the_boost_divides_what_is_added_to_answers():
    true = two_token_signal(HEADS, U, Y)
    plain, boosted = (relative(pairs_of(HEADS, boost, after=rounded(2))(U, Y), true) for boost in (1.0, 1e6))
    assert plain > 1e-4
    assert boosted < 1e-7


@pytest.mark.parametrize(("copies", "repeats"), [(2, 1), (1, 3), (5, 2)])
def test_copies_shift_every_score_by_the_logarithm_of_their_ratio(copies, repeats):
    t = torch.einsum("bd,hde,e->bh", U, HEADS.W, Y)
    shares = (t + math.log(copies / repeats)).sigmoid()
    expected = ((U @ HEADS.v.T) * shares).sum(1)
    assert relative(pairs_of(HEADS)(U, Y, copies, repeats), expected) < 1e-13


class Spy:
    """A layer that notes the longest token it was asked."""

    def __init__(self, heads):
        self.heads, self.longest = heads, 0.0

    def __call__(self, X):
        self.longest = max(self.longest, float(X.norm(dim=2).max()))
        return self.heads(X)


@settings(max_examples=40)
@given(st.floats(0, 6), st.floats(-2, 3), st.floats(-2, 2), st.integers(0, 99))
def test_no_token_is_longer_than_the_bound(boost, length, bound, seed):
    spy, max_norm = Spy(HEADS), 10.0**bound
    pairs = Pairs(OracleEvidence(FunctionOracle(spy), WIDTH), HEADS.v.sum(0), 10.0**boost, max_norm)
    u, y = 10.0**length * normal(seed)(8, WIDTH), normal(seed + 1)(WIDTH)
    fits = float(u.norm(dim=1).max() * y.norm()) <= max_norm**2 / 4 and float(y.norm()) <= 10.0**boost * max_norm / 2
    if fits:
        assert relative(pairs(u, y), two_token_signal(HEADS, u, y)) < 1e-9
    else:
        with pytest.raises(NoPlane, match="longer tokens"):
            pairs(u, y)
    assert spy.longest <= max_norm * (1 + 1e-12)


def test_the_farthest_point_can_be_asked_and_no_farther_one():
    pairs = pairs_of(HEADS, boost=100.0, max_norm=20.0)
    u = U[:1] / U[0].norm() * pairs.farthest(Y)
    pairs(0.999 * u, Y)
    with pytest.raises(NoPlane):
        pairs(1.001 * u, Y)


def test_a_linear_term_is_taken_away():
    e = normal(4)(WIDTH)
    plain = pairs_of(HEADS)
    less = Pairs(plain.evidence, plain.sum_v, linear=e)
    assert torch.allclose(less(U, Y), plain(U, Y) - U @ e, rtol=0, atol=1e-12)


def test_of_vectors_one_direction_may_be_seen():
    heads, direction = vector_layer(3, WIDTH, 4), normal(5)(4)
    whole = Pairs(oracle_of(heads), heads.v.sum(0))
    one = Pairs(oracle_of(heads), heads.v.sum(0), direction=direction)
    assert whole(U, Y).shape == (40, 4)
    assert torch.allclose(one(U, Y), whole(U, Y) @ direction, rtol=0, atol=1e-12)
    assert torch.equal(one.total_v, heads.v.sum(0) @ direction)
    assert torch.equal(whole.total_v, heads.v.sum(0))


@given(st.floats(-30, 15))
def test_logit_is_the_inverse_of_the_sigmoid(t):
    t = torch.tensor(t, dtype=torch.float64)
    assert torch.allclose(logit(t.sigmoid()), t, rtol=0, atol=1e-8)


def test_what_is_no_share_has_no_logit():
    assert not logit(torch.tensor([-0.1, 0.0, 1.0, 1.1]).double()).isfinite().any()
