import math

import pytest
import torch
from tests.attacks.queries.layers import generator, vector_layer
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded
from tests.attacks.queries.random_networks import evidence_of, normal, relative

from unmask.attacks.queries.opening import not_applicable, open_layer
from unmask.attacks.queries.profile import probe_oracle
from unmask.attacks.queries.query_run import QueryRun
from unmask.linalg.heads import HeadWeights

WIDTH = 8


def opened(evidence):
    profile = probe_oracle(evidence, generator())
    run = QueryRun(1, evidence=evidence)
    run.probe(profile)
    return open_layer(run), run.num_asked - profile.num_queries


def test_the_sum_of_v_is_read_with_width_and_four_queries():
    heads = random_head(WIDTH, num_heads=3)
    layer, asked = opened(oracle_of(heads))
    assert asked == WIDTH + 4
    assert relative(layer.pairs.sum_v, heads.v.sum(0)) < 1e-15
    assert layer.pairs.boost == 1
    assert math.isinf(layer.pairs.max_norm)
    assert layer.resolution.precision < 1e-15


@pytest.mark.parametrize(("after", "error"), [(rounded(2), 1e-9), (rounded(4), 1e-11), (added(1e-3), 1e-9)])
def test_errors_that_are_added_are_boosted_away(after, error):
    heads = random_head(WIDTH, num_heads=3)
    layer, _ = opened(oracle_of(heads, after))
    assert layer.pairs.boost > 1e3
    assert layer.resolution.precision < error
    assert relative(layer.pairs.sum_v, heads.v.sum(0)) < 1e-7


def test_a_bound_on_norms_leaves_what_it_must():
    layer, _ = opened(oracle_of(random_head(WIDTH, num_heads=3), rounded(2), max_norm=20.0))
    assert layer.pairs.max_norm == 20
    assert layer.pairs.boost <= 20
    assert 1e-5 < layer.resolution.precision < 1e-2


@pytest.mark.parametrize("after", [None, rounded(2)], ids=["exact", "rounded"])
def test_a_layer_that_says_nothing_is_told(after):
    heads = random_head(WIDTH, num_heads=2)
    layer, _ = opened(oracle_of(HeadWeights(W=heads.W, v=0 * heads.v), after))
    assert layer is None


def test_values_that_cancel_are_not_nothing():
    """Answers to one token are 0, those to two are not."""
    heads = random_head(WIDTH, num_heads=2)
    heads.v[1] = -heads.v[0]
    layer, _ = opened(oracle_of(heads))
    assert layer is not None
    assert layer.pairs.sum_v.norm() < 1e-15


def test_one_direction_of_vectors_is_a_layer_too():
    heads, direction = vector_layer(2, WIDTH, 3), normal(1)(3)
    layer, _ = opened(oracle_of(heads))
    seen = layer.project(direction)
    numbers = HeadWeights(W=heads.W, v=heads.v @ direction)
    U, y = normal(2)(9, WIDTH), normal(3)(WIDTH)
    X = torch.stack([y + U, y.expand(9, -1)], dim=1)
    assert relative(seen.pairs(U, y), numbers(X) - y @ numbers.v.sum(0)) < 1e-12


def test_reasons_name_what_was_seen():
    linear = probe_oracle(oracle_of(random_head(WIDTH)), generator())
    assert "answers that are vectors (answers: numbers" in not_applicable(linear, "vectors")
    bent = probe_oracle(evidence_of(lambda X: random_head(WIDTH)(X).tanh(), WIDTH), generator())
    assert "do not grow with it" in not_applicable(bent, "numbers")
