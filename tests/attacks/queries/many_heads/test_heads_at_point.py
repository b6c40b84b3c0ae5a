import pytest
import torch
from tests.attacks.queries.layers import EXACT, SINGLE, asking_token, generator, isolation_of, joined, one, pairs_of
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.many_heads.heads_at_point import MoreHeadsThanWidth, _values, find_heads
from unmask.attacks.queries.resolution import NoPlane
from unmask.linalg.heads import HeadWeights

WIDTH = 12


def viewed(heads, resolution=EXACT, seed=0, **options):
    """The view from the first plane and point that show the heads."""
    for plane in range(10):
        y = asking_token(heads.v.shape[1], 10 * seed + plane)
        try:
            return find_heads(pairs_of(heads, **options), y, resolution, generator(plane)), y
        except NoPlane:
            continue
    raise AssertionError("ten points show nothing")


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("resolution", "dtype", "allowed"), [(EXACT, torch.float64, 1e-10), (SINGLE, torch.float32, 1e-2)]
)
def test_heads_at_one_y_to_the_last_digits(num_heads, resolution, dtype, allowed):
    heads = random_head(WIDTH, num_heads=num_heads)
    seen, y = viewed(heads, resolution, dtype=dtype)
    order = torch.cdist(heads.v, seen.units.total).argmin(1)
    assert sorted(order.tolist()) == list(range(num_heads))
    assert relative(seen.units.total[order], heads.v) < allowed
    assert relative(seen.w[order], heads.W @ y) < allowed
    assert seen.pairs.linear is None
    assert torch.equal(seen.y, y)


def test_where_no_head_turns_nothing_is_seen():
    heads = random_head(WIDTH, num_heads=2)
    seen, _ = viewed(HeadWeights(W=0 * heads.W, v=heads.v))
    assert seen is None


def test_parallel_heads_are_one_unit_of_several():
    heads = random_head(WIDTH, num_heads=3)
    seen, y = viewed(joined(heads, one(2 * heads.W[1], normal(3)(WIDTH))))
    counts = [seen.units.num_heads(unit) for unit in range(3)]
    assert sorted(counts) == [1, 1, 2]
    unit = counts.index(2)
    slopes = seen.units.slopes[unit, :2].sort().values
    assert float(slopes[1] / slopes[0]) == pytest.approx(2, abs=1e-7)
    assert relative(slopes[0] * seen.w[unit], heads.W[1] @ y) < 1e-7


def test_what_is_linear_besides_is_read_to_the_last_digits():
    heads, v = random_head(WIDTH, num_heads=3), normal(3)(WIDTH)
    seen, _ = viewed(joined(heads, one(0 * heads.W[0], v)))
    is_turned = seen.units.total @ heads.v.T < -0.9 * heads.v.square().sum(1)
    # A head that stands here as its opposite has left its v in the linear term.
    expected = v / 2 + is_turned.any(0).double() @ heads.v
    assert relative(seen.pairs.linear, expected) < 1e-10


@pytest.mark.parametrize("num_heads", [5, 9])
def test_more_heads_than_entries_are_counted_and_refused(num_heads):
    heads = random_head(4, num_heads=num_heads)
    with pytest.raises(MoreHeadsThanWidth, match=f"{num_heads} heads turn on and off, but a token has 4 entries"):
        viewed(heads)


def test_an_oracle_that_is_no_layer_shows_nothing():
    heads = random_head(WIDTH, num_heads=2)
    with pytest.raises(NoPlane):
        find_heads(pairs_of(heads, after=lambda answers: answers.tanh()), asking_token(WIDTH), EXACT, generator())


def test_a_head_that_is_silent_where_it_should_be_on_is_told():
    heads, y = random_head(WIDTH, num_heads=2), asking_token(WIDTH)
    with pytest.raises(NoPlane, match="answers nothing where it should be on"):
        _values(pairs_of(HeadWeights(W=heads.W, v=0 * heads.v)), y, isolation_of(heads, y))
