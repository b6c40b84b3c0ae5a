import pytest
import torch
from tests.attacks.queries.layers import EXACT, asking_token, generator, isolation_of, joined, one, pairs_of
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal, relative

from unmask.attacks.queries.many_heads.head_units import Units
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.resolution import NoPlane
from unmask.linalg.heads import HeadWeights

WIDTH = 12


def case(num_heads=4, width=WIDTH, seed=0, rank=None):
    heads, y = random_head(width, num_heads=num_heads, seed=seed, rank=rank), asking_token(width, seed)
    return heads, y, isolation_of(heads, y)


@pytest.mark.parametrize("num_heads", [1, 2, 4, WIDTH])
def test_at_its_base_a_unit_is_in_between_and_all_others_are_off(num_heads):
    heads, y, isolation = case(num_heads)
    scores = isolation.bases @ (heads.W @ y).T
    assert torch.allclose(scores.diagonal(), torch.full((num_heads,), -1.5).double(), atol=1e-8)
    others = scores[~torch.eye(num_heads, dtype=torch.bool)]
    assert (others < -EXACT.saturation).all()


@pytest.mark.parametrize("num_heads", [1, 4])
def test_a_head_has_leverage_where_the_width_allows_it(num_heads):
    heads, _, isolation = case(num_heads)
    gain = (isolation.bases * heads.v).sum(1).abs()
    assert (gain > 0.2 * isolation.bases.norm(dim=1) * heads.v.norm(dim=1)).all()


def test_probes_leave_other_units_alone_or_turn_them_further_off():
    _, _, isolation = case(4)
    for k in range(4):
        others = torch.arange(4) != k
        changes = isolation.probes[k] @ isolation.w[others].T
        assert (changes < 1e-9).all()
        assert changes[: WIDTH - 3].abs().max() < 1e-9
        assert torch.linalg.cond(isolation.probes[k]) < 1e6


@pytest.mark.parametrize("num_heads", [1, 4, WIDTH])
def test_columns_are_w_times_y(num_heads):
    heads, y, isolation = case(num_heads)
    moved = y + 0.3 * isolation.reach() * torch.eye(WIDTH).double()[:3]
    found = isolation.columns(pairs_of(heads), torch.cat([y[None], moved]))
    expected = torch.einsum("hde,je->jhd", heads.W, torch.cat([y[None], moved]))
    assert relative(found, expected) < (1e-8 if num_heads == WIDTH else 1e-11)


def test_columns_from_a_rough_start():
    """The first look has a few digits; columns have them all, as others stay off."""
    heads, y, _ = case(4)
    rough = Isolation.at(Units.single(heads.v), heads.W @ y * (1 + 1e-3 * normal(1)(4, WIDTH)), EXACT)
    assert relative(rough.columns(pairs_of(heads), y[None])[0], heads.W @ y) < 1e-11


def test_of_a_known_span_only_its_directions_are_asked():
    heads, y, isolation = case(3, rank=2)
    spans = [torch.linalg.svd(W).U[:, :2] for W in heads.W]
    pairs = pairs_of(heads)
    assert relative(isolation.columns(pairs, y[None], spans)[0], heads.W @ y) < 1e-11
    assert pairs.evidence.ledger.num_asked <= 3 * (2 + 2)
    mixed = isolation.columns(pairs, y[None], [spans[0], None, None])
    assert relative(mixed[0], heads.W @ y) < 1e-11


def test_predictions_hold_for_the_true_heads_only():
    heads, y, isolation = case(4)
    w = (heads.W @ y)[None]
    assert float(isolation.misprediction(pairs_of(heads), y[None], w, generator(), 8)) < 1e-12
    assert float(isolation.misprediction(pairs_of(heads), y[None], 1.01 * w, generator(), 8)) > 1e-4
    missing = joined(heads, one(normal(1)(WIDTH, WIDTH) / WIDTH**0.5, 0.01 * heads.v[0]))
    assert float(isolation.misprediction(pairs_of(missing), y[None], w, generator(), 8)) > 1e-4


@pytest.mark.parametrize("num_heads", [2, 4, 8])
def test_within_reach_other_units_stay_off(num_heads):
    for seed in range(3):
        heads, y, isolation = case(num_heads, 16, seed)
        assert 0 < isolation.reach() <= 1
        for j in range(1, 16):
            moved = y.clone()
            moved[j] += isolation.reach()
            scores = isolation.bases @ (heads.W @ moved).T
            others = scores[~torch.eye(num_heads, dtype=torch.bool)]
            # A third of the margin is what a random direction takes; the worst of all takes less than twice that.
            assert (others < -0.35 * EXACT.saturation).all()


def test_equal_directions_cannot_be_isolated():
    heads, y, _ = case(2)
    with pytest.raises(NoPlane, match="too close"):
        isolation_of(HeadWeights(W=heads.W[[0, 0]], v=heads.v), y)


def test_a_score_that_is_nowhere_in_range_is_told():
    heads, y, isolation = case(2)
    silent = HeadWeights(W=heads.W, v=0 * heads.v)
    with pytest.raises(NoPlane, match="cannot be brought into range"):
        isolation.columns(pairs_of(silent), y[None])
