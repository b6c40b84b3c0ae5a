"""Weight scores: unchanged by the gauge, and by nothing else."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.linalg.heads import HeadWeights, canonical_heads
from unmask.scores import score_heads, score_up_to_linear_map

quick = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)
# Means and sums of a few heads in float64 round by about 1e-16 each.
ROUNDING = 1e-14


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_heads(seed: int, num_heads: int = 3, width: int = 4) -> HeadWeights:
    return HeadWeights(W=random_tensor(seed, num_heads, width, width), v=random_tensor(seed + 1, num_heads, width))


def attend(heads: HeadWeights, X: torch.Tensor) -> float:
    """f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·v_hᵀ x_i, slow and obvious."""
    return sum(float(torch.softmax(X @ W @ X[-1], dim=0) @ (X @ v)) for W, v in zip(heads.W, heads.v, strict=True))


def in_another_gauge(heads: HeadWeights, seed: int) -> HeadWeights:
    """Split the first head in two, add a head that does nothing and a pair that cancels, and shuffle."""
    part = random_tensor(seed, heads.v.shape[1])
    idle, pair = random_heads(seed + 2, 1), random_heads(seed + 4, 1)
    W = torch.cat([heads.W[:1], heads.W, idle.W, pair.W, pair.W])
    v = torch.cat([part[None], (heads.v[0] - part)[None], heads.v[1:], 0 * idle.v, pair.v, -pair.v])
    order = torch.randperm(len(v), generator=torch.Generator().manual_seed(seed))
    return HeadWeights(W=W[order], v=v[order])


@quick
@given(seeds, seeds)
def test_proposition_7_1_gauge_keeps_the_function_and_the_score(seed, gauge_seed):
    heads, X = random_heads(seed), random_tensor(seed + 6, 5, 4)
    other = in_another_gauge(heads, gauge_seed)
    canonical = canonical_heads(other)
    assert len(canonical) == 3
    # Terms of order 10 that partly cancel.
    assert attend(other, X) == pytest.approx(attend(heads, X), abs=1e-12)
    assert attend(canonical, X) == pytest.approx(attend(heads, X), abs=1e-12)
    for recovered, true in ((other, heads), (heads, other)):
        score = score_heads(recovered, true)
        assert (score.num_true, score.num_missing, score.num_extra) == (3, 0, 0)
        assert score.worst_W_error < ROUNDING
        # The split parts may be much longer than their sum.
        assert score.worst_v_error < 100 * ROUNDING


@quick
@given(seeds, st.permutations(range(3)))
def test_self_score_is_perfect_in_any_order(seed, order):
    heads = random_heads(seed)
    score = score_heads(HeadWeights(W=heads.W[order], v=heads.v[order]), heads)
    assert score.W_error == score.v_error == score.worst_W_error == score.worst_v_error == 0
    assert score.num_missing == score.num_extra == 0


def test_errors_by_hand():
    W = torch.stack([torch.eye(2), 2 * torch.tensor([[0.0, 1.0], [1.0, 0.0]])])
    v = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    recovered = HeadWeights(W=W * torch.tensor([1.1, 1.0])[:, None, None], v=v * torch.tensor([1.0, 1.2])[:, None])
    score = score_heads(recovered, HeadWeights(W=W, v=v))
    # The example is written in float32.
    assert score.worst_W_error == pytest.approx(0.1, rel=1e-6)
    assert score.W_error == pytest.approx(0.1 * 2**0.5 / 10**0.5, rel=1e-6)
    assert score.worst_v_error == pytest.approx(0.2, rel=1e-6)
    assert score.v_error == pytest.approx(0.8 / 5, rel=1e-6)


def test_missing_and_extra_heads_are_counted():
    heads = random_heads(0)
    fewer = HeadWeights(W=heads.W[:2], v=heads.v[:2])
    score = score_heads(fewer, heads)
    assert (score.num_missing, score.num_extra) == (1, 0)
    assert score.worst_W_error == score.worst_v_error == 1
    assert 0 < score.W_error < 1
    score = score_heads(heads, fewer)
    assert (score.num_missing, score.num_extra) == (0, 1)
    assert score.worst_W_error == 0


def test_unrelated_head_is_missing_and_extra():
    heads = random_heads(0)
    score = score_heads(HeadWeights(W=torch.cat([heads.W[:2], -heads.W[2:]]), v=heads.v), heads)
    assert (score.num_missing, score.num_extra) == (1, 1)
    assert score.worst_W_error == score.worst_v_error == 1


def test_absurd_head_does_not_spoil_the_others():
    eye, swap = torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    true = HeadWeights(W=torch.stack([eye, 0.1 * swap]), v=torch.ones(2, 2))
    # -10·I is so far from the small head that, without a cap, the sum of errors is least crosswise.
    score = score_heads(HeadWeights(W=torch.stack([1.1 * eye, -10 * eye]), v=torch.ones(2, 2)), true)
    assert (score.num_missing, score.num_extra) == (1, 1)


def test_wrong_v_shows_in_v_alone():
    heads = random_heads(0)
    score = score_heads(HeadWeights(W=heads.W, v=-heads.v), heads)
    assert score.W_error == 0
    assert score.v_error == pytest.approx(2)


def test_tolerance_decides_what_is_one_head():
    heads = random_heads(0, num_heads=1)
    # Halves 1e-4 apart: two heads by the default tolerance, one by a coarser one.
    halves = HeadWeights(W=torch.cat([heads.W, heads.W * (1 + 1e-4)]), v=torch.cat([heads.v / 2, heads.v / 2]))
    assert score_heads(halves, heads).num_extra == 1
    coarse = score_heads(halves, heads, tolerance=1e-3)
    assert coarse.num_extra == 0
    # The mean of W and W·(1 + 1e-4).
    assert coarse.W_error == pytest.approx(5e-5, rel=1e-6)
    # Equal to the last bit is equal by any tolerance.
    assert len(canonical_heads(HeadWeights(W=heads.W[[0, 0]], v=heads.v[[0, 0]]), tolerance=1e-14)) == 1


def test_heads_equal_in_float32_merge():
    heads = random_heads(0, num_heads=1)
    halves = HeadWeights(W=torch.cat([heads.W, heads.W.float().double()]), v=torch.cat([heads.v, heads.v]))
    assert len(canonical_heads(halves)) == 1


def test_no_heads():
    heads, none = random_heads(0), HeadWeights(W=torch.zeros(0, 4, 4), v=torch.zeros(0, 4))
    score = score_heads(none, heads)
    assert (score.num_missing, score.num_extra) == (3, 0)
    assert score.W_error == score.v_error == 1
    assert len(canonical_heads(HeadWeights(W=heads.W, v=torch.zeros(3, 4)))) == 0
    score = score_heads(heads, none)
    assert (score.num_true, score.num_extra, score.worst_W_error) == (0, 3, 0)


def test_heads_that_are_not_finite_are_extra():
    heads = random_heads(0)
    W = heads.W.clone()
    W[1, 0, 0] = math.nan
    score = score_heads(HeadWeights(W=W, v=heads.v), heads)
    assert (score.num_missing, score.num_extra, score.worst_W_error) == (1, 1, 1)
    with pytest.raises(InputError, match="not finite"):
        score_heads(heads, HeadWeights(W=W, v=heads.v))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="heads, width"):
        HeadWeights(W=torch.zeros(2, 4, 3), v=torch.zeros(2, 4))
    with pytest.raises(InputError, match="width of true"):
        score_heads(random_heads(0, width=3), random_heads(0, width=4))


@quick
@given(seeds, seeds)
def test_linear_map_is_forgiven(seed, map_seed):
    true, other = random_tensor(seed, 20, 4), random_tensor(seed + 1, 20, 4)
    left, right = torch.linalg.qr(random_tensor(map_seed, 2, 4, 4)).Q
    linear_map = left @ torch.diag(torch.tensor([1.0, 5.0, 20.0, 100.0], dtype=torch.float64)) @ right
    # Least squares is backward stable: rounding by 1e-16 is amplified by the map's condition number, 100.
    assert score_up_to_linear_map(true @ linear_map, true) < 1e-12
    expected = score_up_to_linear_map(other, true)
    assert score_up_to_linear_map(other @ linear_map, true) == pytest.approx(expected, rel=1e-12)


def test_unrelated_matrix_is_not_forgiven():
    true, recovered = random_tensor(0, 200, 10), random_tensor(1, 200, 10)
    # A random span of 10 of 200 dimensions holds a twentieth of the energy, give or take a hundredth.
    assert score_up_to_linear_map(recovered, true) == pytest.approx((1 - 10 / 200) ** 0.5, abs=0.02)


def test_lost_dimension_shows_in_the_residual():
    true = torch.linalg.qr(random_tensor(0, 20, 4)).Q
    recovered = true.clone()
    recovered[:, 3] = recovered[:, 2]
    # One of four orthonormal columns cannot be reached.
    assert score_up_to_linear_map(recovered, true) == pytest.approx(0.5, rel=1e-12)


def test_linear_map_refuses_what_says_nothing():
    with pytest.raises(InputError, match="more rows than columns"):
        score_up_to_linear_map(random_tensor(0, 4, 4), random_tensor(1, 4, 4))
    with pytest.raises(InputError, match="shape of true"):
        score_up_to_linear_map(random_tensor(0, 20, 3), random_tensor(1, 20, 4))
    assert score_up_to_linear_map(random_tensor(0, 20, 4) / 0, random_tensor(1, 20, 4)) == math.inf
