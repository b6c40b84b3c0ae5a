import pytest
import torch
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded
from tests.sampling import sample

import unmask
from unmask.attacks.queries.many_heads.circle_heads import CircleHeadsAttack
from unmask.errors import InputError
from unmask.evidence.oracles import FunctionOracle, OracleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


@sample("num_heads, width", [(1, 8), (2, 8), (4, 16), (5, 12)], [(1, 8), (5, 12)])
def test_heads_behind_a_bound_on_norms(num_heads, width):
    heads = random_head(width, num_heads=num_heads)
    recovery = CircleHeadsAttack()(oracle_of(heads, max_norm=4 * width**0.5))
    score = score_heads(recovery.value, heads)
    assert recovery.status is Status.RECOVERED
    assert score.num_missing == score.num_extra == 0
    assert score.worst_W_error <= 1e-9  # measured: 4e-13 to 4e-11


def test_the_count_is_1_3_queries_for_each_unknown_of_a_column():
    heads = random_head(16, num_heads=4)
    recovery = CircleHeadsAttack()(oracle_of(heads, max_norm=16.0))
    columns = 15 * (int(1.3 * 4 * 16) + 48)
    offsets, circle, opening = 6 * 4 * 14, 240, 16 + 4 + 64
    assert recovery.certificate.details["learning_queries"] <= columns + offsets + 2 * circle + opening


@pytest.mark.parametrize("after", [added(1e-4), rounded(4)])
def test_noise_and_rounding_leave_a_few_digits(after):
    heads = random_head(12, num_heads=3)
    recovery = CircleHeadsAttack()(oracle_of(heads, after, max_norm=14.0))
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-2


def test_float32():
    heads = random_head(12, num_heads=3)
    recovery = CircleHeadsAttack()(oracle_of(heads, dtype=torch.float32, max_norm=14.0))
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, heads).worst_W_error <= 1e-3


@sample("multiple", [-2.0, -0.5, -1.0, 0.0, 3.0], [-1.0, 0.0, 3.0])
def test_multiples_of_a_head_are_told_apart(multiple):
    heads = random_head(10, num_heads=3)
    more = HeadWeights(W=torch.cat([heads.W, multiple * heads.W[:1]]), v=torch.cat([heads.v, random_head(10, 5).v]))
    recovery = CircleHeadsAttack()(oracle_of(more, max_norm=14.0))
    score = score_heads(recovery.value, more)
    assert recovery.status is Status.RECOVERED
    assert score.num_missing == score.num_extra == 0
    assert score.worst_W_error <= 1e-6


@pytest.mark.slow
def test_the_front_door_reads_a_head_and_its_negative_multiple():
    heads = random_head(8, num_heads=2)
    more = HeadWeights(W=torch.cat([heads.W, -2 * heads.W[:1]]), v=torch.cat([heads.v, random_head(8, 5).v]))
    recovery = unmask.recover_weights(FunctionOracle(more), width=8)
    assert recovery.status is Status.RECOVERED
    assert score_heads(recovery.value, more).worst_W_error <= 1e-6


def test_what_is_no_layer_is_refused():
    heads = random_head(6, num_heads=2)
    for function in (
        lambda X: heads(X) + 1e-2 * X[:, 0].prod(1).sin() * X[:, -1, 0],
        lambda X: heads(X) * (1 + 0.05 * torch.cos(3 * X.sum((1, 2)))),
    ):
        recovery = CircleHeadsAttack()(OracleEvidence(FunctionOracle(function), 6, max_norm=10.0))
        assert not recovery.status.conclusive
        assert len(recovery.value) == 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_by_chance_are_refused(seed):
    generator = torch.Generator().manual_seed(seed)

    def answer(X):
        """Linear in one token, by chance in two."""
        one = X.shape[1] == 1
        return X[:, 0].sum(1) if one else torch.randn(len(X), generator=generator, dtype=torch.float64)

    recovery = CircleHeadsAttack()(OracleEvidence(FunctionOracle(answer), 6, max_norm=10.0))
    assert not recovery.status.conclusive
    assert len(recovery.value) == 0


def test_a_small_budget_and_silence_are_told():
    heads = random_head(6, num_heads=2)
    assert CircleHeadsAttack()(oracle_of(heads, budget=500, max_norm=10.0)).status is Status.BUDGET_EXHAUSTED
    heads.v.zero_()
    assert CircleHeadsAttack()(oracle_of(heads, max_norm=10.0)).status is Status.NOT_IDENTIFIABLE


def test_settings_are_checked():
    with pytest.raises(InputError, match="passes must be 1 or 2"):
        CircleHeadsAttack(passes=3)
