import pytest
import torch
from tests.attacks.queries.layers import (
    EXACT,
    SINGLE,
    asking_token,
    generator,
    joined,
    one,
    pairs_of,
    two_token_signal,
)
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.many_heads.gating import FirstLook, first_look
from unmask.attacks.queries.resolution import NoPlane
from unmask.linalg.heads import HeadWeights


def looked(heads, resolution=EXACT, seed=0, y=None, **options) -> FirstLook:
    """The first look in a plane that shows the heads; one in ten planes or so does not."""
    y = asking_token(heads.v.shape[1], seed) if y is None else y
    for plane in range(8):
        try:
            return first_look(pairs_of(heads, **options), y, resolution, generator(10 * seed + plane))
        except NoPlane:
            continue
    raise AssertionError("eight planes show nothing")


def matched(look, v):
    """For every true v the place at which it was found."""
    return torch.cdist(v, look.v).argmin(1)


# Difference quotients in a region are read with steps of 10⁻³ of its width: a few digits, which is all it needs.
@pytest.mark.parametrize(("num_heads", "width"), [(1, 2), (1, 16), (3, 8), (8, 16)])
@pytest.mark.parametrize(
    ("resolution", "dtype", "allowed"), [(EXACT, torch.float64, 1e-5), (SINGLE, torch.float32, 0.05)]
)
def test_all_heads_are_seen_with_their_v_and_w(num_heads, width, resolution, dtype, allowed):
    heads, y = random_head(width, num_heads=num_heads, seed=num_heads), asking_token(width)
    look = looked(heads, resolution, dtype=dtype)
    order = matched(look, heads.v)
    assert sorted(order.tolist()) == list(range(num_heads))
    assert relative(look.v[order], heads.v) < allowed
    assert relative(look.w[order], heads.W @ y) < allowed
    assert look.linear is None


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_w_may_have_any_scale(scale):
    heads = random_head(8, num_heads=3)
    heads = HeadWeights(W=scale * heads.W, v=heads.v)
    look = looked(heads)
    order = matched(look, heads.v)
    assert relative(look.w[order], heads.W @ asking_token(8)) < 1e-4


def signal(look, U):
    """What the look says of F, in its own words: eᵀu + Σ_h (v_hᵀu)·σ(uᵀw_h)."""
    return U @ look.linear + ((U @ look.v.T) * (U @ look.w.T).sigmoid()).sum(1)


@pytest.mark.parametrize("name", ["W = 0", "opposite W"])
def test_where_signs_cannot_be_told_the_rest_is_linear(name):
    heads, y, v = random_head(8, num_heads=3), asking_token(8), normal(5)(8)
    layer = joined(heads, one(0 * heads.W[0] if name == "W = 0" else -heads.W[0], v))
    look = looked(layer)
    assert len(look.v) == 3
    assert look.linear.norm() > 0.1
    U = 2 * normal(1)(50, 8)
    assert relative(signal(look, U), two_token_signal(layer, U, y)) < 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_heads_whose_v_sum_to_zero_may_all_be_on_or_all_be_off(seed):
    """Both fit two tokens, so that no sign is taken for granted."""
    heads, y = random_head(8, num_heads=3, seed=seed), asking_token(8, seed)
    heads.v[2] = -heads.v[0] - heads.v[1]
    look = looked(heads, seed=seed)
    assert look.linear is not None
    U = 2 * normal(1)(50, 8)
    assert relative(signal(look, U), two_token_signal(heads, U, y)) < 1e-4


def test_parallel_heads_cross_together():
    heads = random_head(8, num_heads=3)
    assert len(looked(joined(heads, one(2 * heads.W[0], normal(5)(8)))).v) == 3


def test_where_no_head_turns_all_is_linear():
    heads = random_head(8)
    look = looked(HeadWeights(W=0 * heads.W, v=heads.v))
    assert len(look.v) == 0
    assert torch.equal(look.linear, heads.v[0] / 2)


def test_a_plane_takes_two_entries():
    with pytest.raises(NoPlane, match="one entry"):
        first_look(pairs_of(random_head(1)), torch.ones(1).double(), EXACT, generator())


@pytest.mark.parametrize("max_norm", [10.0, 300.0])
def test_heads_are_not_turned_by_tokens_that_are_too_short(max_norm):
    """`pairs_of` refuses longer tokens by an assertion, so that none was asked."""
    with pytest.raises(NoPlane, match=r"longer tokens|as long as it takes"):
        first_look(pairs_of(random_head(8, num_heads=3), max_norm=max_norm), asking_token(8), EXACT, generator())


@pytest.mark.parametrize("num_heads", [1, 4, 8])
def test_the_cost_is_what_the_card_says(num_heads):
    pairs = pairs_of(random_head(16, num_heads=num_heads))
    first_look(pairs, asking_token(16), EXACT, generator(1))
    assert pairs.evidence.ledger.num_asked <= (2 * num_heads + 1) * 16 + 130 * num_heads + 150
