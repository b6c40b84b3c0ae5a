import pytest
import torch
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded
from tests.sampling import sample

from unmask.attacks.queries.one_head.low_rank import LowRankAttack
from unmask.errors import InputError
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads

RANK_UNKNOWN = LowRankAttack()


def learn(heads, attack=RANK_UNKNOWN, **options):
    recovery = attack(oracle_of(heads, **options))
    return recovery, score_heads(recovery.value, heads), recovery.certificate.details["learning_queries"]


def degrees_of_freedom(d, r):
    return r * (2 * d - r)


@pytest.mark.parametrize(("d", "r"), [(16, 1), (24, 3), (64, 4), (32, 32), (128, 8)])
def test_theorem_5_1_with_the_rank_known_exactly_the_degrees_of_freedom(d, r):
    for seed in range(2):
        recovery, score, queries = learn(random_head(d, seed, rank=r), LowRankAttack(rank=r, seed=seed))
        assert recovery.status is Status.RECOVERED
        assert queries == degrees_of_freedom(d, r) + d
        assert score.W_error <= 1e-12  # r random columns of rank r may be nearly dependent: a few hundred roundings


@sample("seed", range(10), [0, 1])
def test_theorem_5_1_with_the_rank_unknown(seed):
    recovery, score, queries = learn(random_head(128, seed, rank=8), LowRankAttack(seed=seed))
    assert recovery.status is Status.RECOVERED
    assert "rank 8" in recovery.reason
    assert queries == degrees_of_freedom(128, 8) + 128 + (128 - 8)  # one check for each column in the span
    assert score.W_error <= 1e-12


@sample("seed", range(10), [0, 1])
def test_float32_with_the_rank_unknown(seed):
    recovery, score, queries = learn(random_head(128, seed, rank=8), LowRankAttack(seed=seed), dtype=torch.float32)
    assert recovery.status is Status.RECOVERED
    assert "rank 8" in recovery.reason
    assert queries <= 1.25 * degrees_of_freedom(128, 8) + 128
    assert score.W_error <= 1e-5  # amplified by nearly dependent columns, of which one more than the rank is measured


def test_full_rank_costs_no_more_than_all_entries():
    for seed in range(3):
        recovery, score, queries = learn(random_head(24, seed), LowRankAttack(seed=seed))
        assert recovery.status is Status.RECOVERED
        assert queries == 24 + 24**2
        assert score.W_error <= 1e-13


def test_spread_singular_values_are_all_found():
    head = random_head(32)
    left, _, right = torch.linalg.svd(head.W[0])
    values = torch.tensor([1.0, 1e-2, 1e-4, 1e-6], dtype=torch.float64)
    head.W[0] = (left[:, :4] * values) @ right[:4]
    recovery, score, queries = learn(head)
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 1e-12
    assert queries <= 1.3 * degrees_of_freedom(32, 4) + 2 * 32


def test_too_low_a_rank_is_refused_and_too_high_a_one_costs_queries_only():
    head = random_head(32, rank=4)
    recovery, *_ = learn(head, LowRankAttack(rank=3))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0
    recovery, score, queries = learn(head, LowRankAttack(rank=6))
    assert recovery.status is Status.RECOVERED
    assert 0 <= queries - (degrees_of_freedom(32, 6) + 32) <= 6  # norms of columns differ: some saturate
    assert score.W_error <= 1e-13


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("deviation", [1e-6, 1e-4])
def test_noise_asks_for_more_columns(deviation, rank):
    recovery, score, queries = learn(
        random_head(64, rank=4), LowRankAttack(rank=rank), after=added(deviation), max_norm=10.0
    )
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 10 * deviation  # 12·τ/(L|v|) for all entries; three times the columns nearly reach it
    assert 2 * degrees_of_freedom(64, 4) < queries < 3 * degrees_of_freedom(64, 4)


def test_rounding_hides_nothing_where_tokens_may_be_long():
    recovery, score, _ = learn(random_head(64, rank=4), after=rounded(2))
    assert recovery.status is Status.RECOVERED
    assert score.W_error <= 1e-10


def test_w_zero_and_v_zero():
    head = random_head(12)
    recovery, *_ = learn(HeadWeights(W=0 * head.W, v=head.v))
    assert recovery.status is Status.RECOVERED
    assert not recovery.value.W.any()
    recovery, *_ = learn(HeadWeights(W=head.W, v=0 * head.v))
    assert recovery.status is Status.NOT_IDENTIFIABLE
    assert len(recovery.value) == 0


def test_several_heads_of_low_rank_are_refused():
    recovery, *_ = learn(random_head(24, rank=2, num_heads=2))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0


def test_a_spent_budget_claims_nothing_of_w():
    head = random_head(32, rank=3)
    recovery, *_ = learn(head, budget=200)
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert recovery.value.W.isnan().all()
    assert torch.equal(recovery.value.v, head.v)


@pytest.mark.parametrize("rank", [0, -1, 9])
def test_ranks_that_cannot_be(rank):
    with pytest.raises(InputError, match="rank must be"):
        LowRankAttack(rank=rank)(oracle_of(random_head(8)))
