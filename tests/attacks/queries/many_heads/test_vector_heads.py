import pytest
import torch
from tests.attacks.queries.layers import generator, joined, one, vector_layer
from tests.attacks.queries.random_heads import oracle_of, random_head, rounded
from tests.attacks.queries.random_networks import evidence_of, normal

from unmask.attacks.queries.many_heads.vector_heads import VectorHeadsAttack
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads


def learn(heads, seed=0, **options):
    recovery = VectorHeadsAttack(seed=seed)(oracle_of(heads, **options))
    return recovery, score_heads(recovery.value, heads)


@pytest.mark.parametrize("seed", range(3))
def test_four_heads_of_width_32_with_far_fewer_queries_than_unknowns(seed):
    recovery, score = learn(vector_layer(4, 32, 32, seed), seed)
    assert recovery.status is Status.RECOVERED
    assert score.num_missing == score.num_extra == 0
    assert max(score.worst_W_error, score.worst_v_error) <= 1e-12
    details = recovery.certificate.details
    assert details["degrees_of_freedom"] == 4 * (32**2 + 32**2)
    # Every answer shows all heads: d² queries for all W, and what a look at one y takes.
    assert details["learning_queries"] <= 32**2 + 5 * 4 * 32 + 200 * 4 < 0.65 * 4 * 32**2


@pytest.mark.parametrize(("num_heads", "width", "num_outputs"), [(1, 6, 2), (4, 12, 4), (3, 8, 20)])
def test_other_shapes(num_heads, width, num_outputs):
    recovery, score = learn(vector_layer(num_heads, width, num_outputs))
    assert recovery.status is Status.RECOVERED
    assert score.num_missing == score.num_extra == 0
    assert max(score.worst_W_error, score.worst_v_error) <= 1e-10


def test_float32():
    recovery, score = learn(vector_layer(4, 16, 16), dtype=torch.float32)
    assert recovery.status is Status.RECOVERED
    assert score.worst_W_error <= 1e-4


def test_rounding_hides_nothing_where_tokens_may_be_long():
    recovery, score = learn(vector_layer(3, 12, 12), after=rounded(2))
    assert recovery.status is Status.RECOVERED
    assert score.worst_W_error <= 1e-6


def test_more_heads_than_outputs_are_refused():
    recovery, _ = learn(vector_layer(5, 12, 4))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0
    assert "5 heads cannot be told apart in answers of 4 numbers" in recovery.reason


def test_more_heads_than_the_width_are_refused():
    recovery, _ = learn(vector_layer(6, 4, 8))
    assert recovery.status is Status.NOT_APPLICABLE
    assert len(recovery.value) == 0


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0])
def test_heads_that_this_attack_is_not_for_are_refused(factor):
    heads = vector_layer(3, 8, 8)
    recovery, _ = learn(joined(heads, one(factor * heads.W[0], normal(1)(8, 8))))
    assert recovery.status is Status.NOTHING_FOUND
    assert len(recovery.value) == 0


def test_heads_with_equal_w_are_one():
    heads = vector_layer(3, 8, 8)
    recovery, score = learn(joined(heads, one(heads.W[0], normal(1)(8, 8))))
    assert recovery.status is Status.RECOVERED
    assert len(recovery.value) == 3
    assert score.worst_v_error <= 1e-11


def test_a_layer_that_answers_nothing_is_not_identifiable():
    heads = vector_layer(2, 8, 4)
    assert learn(HeadWeights(W=heads.W, v=0 * heads.v))[0].status is Status.NOT_IDENTIFIABLE


def largest(answers, num):
    """The defence that shows only the largest entries of an answer."""
    kept = answers.abs().topk(num, dim=1)
    return torch.zeros_like(answers).scatter(1, kept.indices, answers.gather(1, kept.indices))


LAYER, CHANCE = vector_layer(3, 8, 8), generator(5)
NO_LAYERS = {
    "largest 1": lambda X: largest(LAYER(X), 1),
    "largest 7": lambda X: largest(LAYER(X), 7),
    "ReLU": lambda X: LAYER(X).relu(),
    "tanh": lambda X: LAYER(X).tanh(),
    "chance": lambda X: torch.randn(len(X), 8, generator=CHANCE),
    "hash": lambda X: torch.sin(1e4 * X.sum(1)),
    "signs": lambda X: LAYER(X).sign(),
    "numbers": random_head(8, num_heads=2),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("function", NO_LAYERS.values(), ids=NO_LAYERS)
def test_what_is_no_layer_of_vectors_is_never_claimed(function, seed):
    recovery = VectorHeadsAttack(max_planes=1, seed=seed)(evidence_of(function, 8))
    assert not recovery.status.conclusive
    assert not recovery.certificate.holds
    assert len(recovery.value) == 0


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_budget_that_ends_leaves_whole_columns(share):
    whole = oracle_of(LAYER)
    VectorHeadsAttack()(whole)
    budget = int(share * whole.ledger.num_paid)
    evidence = oracle_of(LAYER, budget=budget)
    recovery = VectorHeadsAttack()(evidence)
    assert recovery.status is Status.BUDGET_EXHAUSTED
    assert evidence.ledger.num_paid <= budget
    for W, v in zip(recovery.value.W, recovery.value.v, strict=True):
        head = int((LAYER.v - v).norm(dim=(1, 2)).argmin())
        known = W.isfinite().all(0)
        assert W[:, ~known].isnan().all()
        assert torch.allclose(W[:, known], LAYER.W[head][:, known], rtol=0, atol=1e-10)
    assert len(recovery.value) == (3 if share == 0.9 else 0)


def test_the_seed_decides_everything():
    first, second = (learn(LAYER, seed=3)[0] for _ in range(2))
    # Up to the last bits: those of small least squares depend on where numbers lie in memory.
    assert torch.allclose(first.value.W, second.value.W, rtol=0, atol=1e-13)
    assert first.cost.queries == second.cost.queries
