import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.random_heads import added, oracle_of, random_head, rounded

from unmask.attacks.queries.one_head.boosted_probes import (
    BoostedProbes,
    columns_at_once,
    measure_v,
    random_basis,
    score_reader,
)
from unmask.attacks.queries.profile import probe_oracle


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reader_of(head, **options):
    evidence = oracle_of(head, **options)
    profile = probe_oracle(evidence, torch.Generator().manual_seed(0))
    return score_reader(evidence, profile, measure_v(evidence, profile))


def unit_rows(X):
    return X / X.norm(dim=1, keepdim=True)


@given(st.integers(1, 12), st.integers(0, 50))
@settings(max_examples=30)
def test_probes_lean_towards_v_and_are_inverted(width, seed):
    v = normal(width, seed=seed)
    v[seed % width] = 0 if width > 1 else v[0]
    probes = BoostedProbes.random(v, torch.Generator().manual_seed(seed))
    assert torch.allclose(probes.directions.norm(dim=1), torch.ones(width, dtype=torch.float64))
    assert (probes.directions @ v).min() >= v.norm() / math.sqrt(2) * (1 - 1e-12)
    w = normal(3, width, seed=seed + 1)
    # 2(1 + √d) at the most times the rounding of one product.
    assert torch.allclose(probes.solve(w @ probes.directions.T), w, rtol=0, atol=1e-13)


def test_a_part_of_a_basis_inverts_what_lies_in_its_span():
    v, basis = normal(10), random_basis(10, torch.Generator().manual_seed(3))[:4]
    w = normal(2, 4, seed=5) @ basis
    probes = BoostedProbes(basis, v)
    assert torch.allclose(probes.solve(w @ probes.directions.T), w, rtol=0, atol=1e-13)
    outside = normal(1, 10, seed=6)
    assert not torch.allclose(probes.solve(outside @ probes.directions.T), outside, atol=1e-2)


def test_v_along_one_vector_of_the_basis_is_the_worst_case_and_still_fine():
    v = torch.zeros(64, dtype=torch.float64)
    v[5] = 1e-9
    probes = BoostedProbes(torch.eye(64, dtype=torch.float64), v)
    inverse = probes.solve(torch.eye(64, dtype=torch.float64))
    assert torch.linalg.matrix_norm(inverse, 2) <= 2 * (1 + 8)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 100.0, 1e6])
def test_scores_are_read_at_any_scale(scale):
    """Too large a scale is lowered where it saturates; too small a one loses digits, as many as it is too small."""
    head = random_head(16)
    reader = reader_of(head)
    U, Y = BoostedProbes.random(reader.v, torch.Generator().manual_seed(1)).directions, unit_rows(normal(16, 16))
    found = reader.scores(U, Y, scale)
    error = (found - torch.einsum("bi,ij,bj->b", U, head.W[0], Y)).abs().max()
    # 1/σ'(5) = 150 roundings at the worst, and t/s.
    assert error <= 150 * 1e-15 * max(1, 1 / scale)


@pytest.mark.parametrize("bound", [0.5, 7.0, 1e3])
@pytest.mark.parametrize("after", [None, added(1e-3), rounded(3)])
def test_tokens_stay_within_the_bound_and_long_where_errors_are_added(bound, after):
    reader = reader_of(random_head(8), after=after, max_norm=bound)
    scales = torch.logspace(-6, 6, 50, dtype=torch.float64)
    long, short = reader.norms(scales)
    assert (long + short).max() <= bound
    assert torch.allclose(long * short, scales.clamp(max=reader.largest_scale))
    if after is not None and bound < 10:
        assert torch.allclose((long + short), torch.tensor(0.999 * bound, dtype=torch.float64))


def test_the_told_error_of_a_score_is_its_error():
    head = random_head(16)
    deviation = 1e-5
    reader = reader_of(head, after=added(deviation), max_norm=10.0)
    U = BoostedProbes.random(reader.v, torch.Generator().manual_seed(1)).directions.repeat(64, 1)
    Y = unit_rows(normal(len(U), 16))
    t = 0.1 * reader.scores(U, Y, 0.1)
    off = (t - 0.1 * torch.einsum("bi,ij,bj->b", U, head.W[0], Y)).square().mean().sqrt()
    # v has its own error, and the profile's guess of the arithmetic's precision is high under noise.
    assert 0.1 * reader.error(0.1) < off < 3 * reader.error(0.1)


def test_an_answer_of_no_head_is_not_a_number():
    head = random_head(8)
    reader = reader_of(head)
    wrong = score_reader(reader.pairs.evidence, reader.profile, -reader.v)
    U, Y = BoostedProbes.random(reader.v, torch.Generator().manual_seed(1)).directions, unit_rows(normal(8, 8))
    assert wrong.scores(U, Y, 1.0).isnan().all()


def test_v_is_measured_in_any_basis_and_long_where_answers_are_rounded():
    head = random_head(16)
    evidence = oracle_of(head, rounded(2))
    profile = probe_oracle(evidence, torch.Generator().manual_seed(0))
    for basis in (None, random_basis(16, torch.Generator().manual_seed(2))):
        assert torch.allclose(measure_v(evidence, profile, basis), head.v[0], rtol=0, atol=1e-13)


def test_as_many_columns_at_once_as_memory_and_budget_allow():
    head = random_head(8)
    assert columns_at_once(oracle_of(head), 8) == 2**26 // (16 * 8 * 8)
    assert columns_at_once(oracle_of(head, budget=25), 8) == 3
    assert columns_at_once(oracle_of(head, budget=0), 8) == 1
