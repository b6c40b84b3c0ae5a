import pytest
from tests.attacks.queries.layers import EXACT, asking_token, isolation_of, joined, one, pairs_of
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.many_heads.heads_at_point import find_suspects, open_cluster
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.resolution import NoPlane
from unmask.linalg.heads import HeadWeights

WIDTH = 8


def case(multiples, seed=0):
    """Three heads, the second with further ones whose W are multiples of its own; and units that hold them as one."""
    heads, y, draw = random_head(WIDTH, num_heads=3, seed=seed), asking_token(WIDTH, seed), normal(40 + seed)
    more = [one(factor * heads.W[1], draw(WIDTH) / WIDTH**0.5) for factor in multiples]
    layer = joined(heads, *more)
    total = heads.v.clone()
    total[1] += sum(each.v[0] for each in more)
    # As a first look would have it: the whole of v, and a direction between those of the members.
    W = heads.W.clone()
    W[1] *= 1 + sum(factor - 1 for factor in multiples) / (len(multiples) + 1)
    return layer, y, isolation_of(HeadWeights(W=W, v=total), y)


@pytest.mark.parametrize("multiples", [(2.0,), (0.5,), (2.0, 5.0)])
def test_a_unit_of_several_heads_is_suspected(multiples):
    layer, y, isolation = case(multiples)
    assert find_suspects(pairs_of(layer), y, isolation) == [1]


def test_single_heads_are_not_suspected():
    heads, y = random_head(WIDTH, num_heads=3), asking_token(WIDTH)
    pairs = pairs_of(heads)
    assert find_suspects(pairs, y, isolation_of(heads, y)) == []
    assert pairs.evidence.ledger.num_asked == 6


@pytest.mark.parametrize(("multiples", "allowed"), [((2.0,), 1e-6), ((0.4,), 1e-6), ((2.5, 6.0), 1e-3)])
@pytest.mark.parametrize("seed", range(2))
def test_two_and_three_heads_are_opened(multiples, allowed, seed):
    layer, y, isolation = case(multiples, seed)
    units, w = open_cluster(pairs_of(layer), y, isolation, 1, is_open=False)
    assert units.num_heads(1) == 1 + len(multiples)
    assert check(units, w, layer, y) < allowed
    # Once it is open, long probes that change no score give digits that short ones lose.
    again = Isolation.at(units, w, EXACT)
    units, w = open_cluster(pairs_of(layer), y, again, 1, is_open=True)
    assert check(units, w, layer, y) < allowed


def check(units, w, layer, y):
    """The largest relative error of v and λ·w over the heads of unit 1, which are the layer's second and all after."""
    members = [1, *range(3, len(layer))]
    directions = units.slopes[1, : len(members), None] * w[1]
    true = layer.W[members] @ y
    order = directions.norm(dim=1).argsort()[true.norm(dim=1).argsort().argsort()]
    v = units.v[1, : len(members)]
    return max(relative(directions[order], true), relative(v[order], layer.v[members]))


def test_four_heads_are_too_many():
    layer, y, isolation = case((2.0, 4.0, 8.0))
    with pytest.raises(NoPlane, match="more than three"):
        open_cluster(pairs_of(layer), y, isolation, 1, is_open=False)


def test_a_single_head_is_no_cluster():
    heads, y = random_head(WIDTH, num_heads=3), asking_token(WIDTH)
    with pytest.raises(NoPlane):
        open_cluster(pairs_of(heads), y, isolation_of(heads, y), 1, is_open=False)


def test_heads_of_opposite_direction_are_refused():
    layer, y, isolation = case((-2.0,))
    with pytest.raises(NoPlane):
        open_cluster(pairs_of(layer), y, isolation, 1, is_open=False)


def test_the_cost_is_17_answers_a_probe():
    layer, y, isolation = case((2.0,))
    pairs = pairs_of(layer)
    open_cluster(pairs, y, isolation, 1, is_open=False)
    assert pairs.evidence.ledger.num_asked == 17 * (WIDTH + 1)
