import pytest
import torch
from tests.attacks.queries.layers import joined, one, vector_layer
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded
from tests.attacks.queries.random_networks import normal

from unmask.attacks.queries.missed_heads import look_for_missed_heads, refit_in_subspace
from unmask.attacks.queries.query_run import QueryRun
from unmask.linalg.heads import HeadWeights

WIDTH = 8
HEADS = random_head(WIDTH, num_heads=2)
SMALL = one(normal(1)(WIDTH, WIDTH), normal(2)(WIDTH))


def refit(true, learned=HEADS, seed=0, boost=1.0, **options):
    run = QueryRun(seed, evidence=oracle_of(true, **options))
    run.probe()
    return look_for_missed_heads(run, learned, boost)


def with_small(share):
    return joined(HEADS, HeadWeights(W=SMALL.W, v=share * SMALL.v))


ORACLES = {
    "float64": {},
    "float32": {"dtype": torch.float32},
    "rounded to float32": {"after": lambda answers: answers.float().double()},
    "4 decimals": {"after": rounded(4)},
    "noise": {"after": added(1e-3), "max_norm": 6.0},
    "2 decimals": {"after": rounded(2), "max_norm": 6.0},
}


@pytest.mark.parametrize("name", ORACLES)
def test_right_heads_leave_the_oracle_s_own_error_though_learning_was_off(name):
    off = HeadWeights(W=HEADS.W * (1 + 1e-4 * normal(5)(2, WIDTH, WIDTH)), v=HEADS.v)
    for seed in range(4):
        found = refit(HEADS, off, seed, **ORACLES[name])
        assert found.left <= found.allowed


@pytest.mark.parametrize(
    ("name", "share"),
    [("float64", 1e-11), ("float32", 1e-4), ("rounded to float32", 1e-5), ("noise", 0.1), ("2 decimals", 0.3)],
)
def test_a_missed_head_is_seen_down_to_the_oracle_s_own_error(name, share):
    found = refit(with_small(share), **ORACLES[name])
    assert found.left > found.allowed


def test_vectors_and_one_entry():
    vectors = vector_layer(2, WIDTH, 3)
    found = refit(vectors, vectors)
    assert found.left <= found.allowed
    single = random_head(1)
    found = refit(single, single)
    assert found.left <= found.allowed


def test_queries_are_counted_and_tokens_keep_to_the_bound():
    run = QueryRun(evidence=oracle_of(HEADS, max_norm=3.0))
    run.probe()
    before = run.num_asked
    found = refit_in_subspace(run, HEADS, 1e3)
    assert found.num_queries == run.num_asked - before == 2 * (24 * 2 + 46)
