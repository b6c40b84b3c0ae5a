import math

import pytest
import torch
from tests.attacks.queries.layers import EXACT, asking_token, isolation_of, joined, one, pairs_of, vector_layer
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.many_heads.head_values import all_off, gradient, still_moves, totals

WIDTH = 10


def case(num_heads=3, seed=0):
    heads, y = random_head(WIDTH, num_heads=num_heads, seed=seed), asking_token(WIDTH, seed)
    return heads, y, isolation_of(heads, y)


@pytest.mark.parametrize("num_heads", [1, 3, WIDTH])
def test_totals_are_v_to_the_last_digits(num_heads):
    heads, y, isolation = case(num_heads)
    pairs = pairs_of(heads)
    assert relative(totals(pairs, y, isolation), heads.v) < (1e-10 if num_heads == WIDTH else 1e-13)
    assert pairs.evidence.ledger.num_asked == num_heads * (WIDTH + 1)


def test_totals_of_vectors():
    heads, y = vector_layer(3, WIDTH, 4), asking_token(WIDTH)
    numbers = random_head(WIDTH, num_heads=3)
    assert relative(totals(pairs_of(heads), y, isolation_of(numbers, y)), heads.v) < 1e-12


@pytest.mark.parametrize(("copies", "share"), [(1, 1 / 2), (2, 2 / 3)])
def test_where_all_are_off_a_head_without_w_is_left(copies, share):
    heads, y, isolation = case()
    v = normal(1)(WIDTH)
    layer = joined(heads, one(torch.zeros_like(heads.W[0]), v))
    assert relative(all_off(pairs_of(layer), y, isolation, copies), share * v) < 1e-12
    assert all_off(pairs_of(heads), y, isolation, copies).norm() < 1e-12


@pytest.mark.parametrize("score", [-2.0, -0.5, 0.7])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_gradient_at_a_score_is_v_times_its_share(score, copies):
    heads, y, isolation = case()
    for unit in range(3):
        found = gradient(pairs_of(heads), y, isolation, unit, score, copies)
        share = 1 / (1 + math.exp(-score) / copies)
        assert relative(found, share * heads.v[unit]) < 1e-10


def test_still_moves_change_no_score_that_is_in_range():
    _, _, isolation = case()
    point = isolation.bases[1]
    moves = still_moves(isolation, point, {1: 0.0})
    assert len(moves) == WIDTH - 1
    changes = moves @ isolation.w.T
    assert changes[:, 1].abs().max() < 1e-9
    assert (changes[:, [0, 2]] < 1e-9).all()
    on = still_moves(isolation, point, {1: EXACT.saturation})
    assert len(on) == WIDTH
    assert float((on @ isolation.w[1]).max()) > 10
