from dataclasses import replace

import pytest
import torch
from tests.attacks.queries.layers import asking_token, isolation_of, joined, one, pairs_of
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.many_heads.head_values import all_off
from unmask.attacks.queries.many_heads.multi_head import split_signs
from unmask.linalg.heads import HeadWeights

WIDTH = 8


@pytest.mark.parametrize(("num_first", "same"), [(1, True), (2, False)])
def test_two_tokens_cannot_tell_a_head_from_its_opposite_beside_a_still_one(num_first, same):
    """(W, v) and (−W, −v) + (0, 2v) answer alike to two tokens, and differently to the first one twice."""
    head = random_head(WIDTH)
    W, v = head.W[0], head.v[0]
    other = joined(one(-W, -v), one(0 * W, 2 * v))
    first, last = normal(1)(40, 1, WIDTH), normal(2)(40, 1, WIDTH)
    X = torch.cat([first.expand(-1, num_first, -1), last], dim=1)
    apart = relative(other(X), head(X))
    assert apart < 1e-13 if same else apart > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_v_of_heads_of_their_opposites_and_of_a_still_one(seed):
    """Unit 0 is a head, unit 1 one that was taken with the wrong sign, unit 2 a pair of opposites; and W = 0."""
    heads, y, draw = random_head(WIDTH, num_heads=3, seed=seed), asking_token(WIDTH, seed), normal(70 + seed)
    W, plus = heads.W, heads.v.clone()
    minus, still = torch.zeros_like(plus), draw(WIDTH)
    plus[1], minus[1], minus[2] = 0, draw(WIDTH), draw(WIDTH)
    layer = joined(
        HeadWeights(W=W[[0, 2]], v=plus[[0, 2]]),
        HeadWeights(W=-W[[1, 2]], v=minus[[1, 2]]),
        one(0 * W[0], still),
    )
    isolation = isolation_of(HeadWeights(W=W, v=plus - minus), y)
    pairs = pairs_of(layer)
    pairs = replace(pairs, linear=all_off(pairs, y, isolation))
    before = pairs.evidence.ledger.num_asked
    found = split_signs(pairs, y, isolation)
    assert pairs.evidence.ledger.num_asked - before <= (3 + 3) * (WIDTH + 1)
    for part, expected in zip(found, (plus, minus, still), strict=True):
        assert relative(part, expected) < 1e-9
    # What is none is none exactly, so that no head is made of rounding.
    assert not found[1][0].any()
    assert not found[0][1].any()
