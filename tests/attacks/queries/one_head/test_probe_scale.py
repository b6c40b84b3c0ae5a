import pytest
import torch
from tests.attacks.queries.random_heads import oracle_of, random_head

from unmask.attacks.queries.one_head.boosted_probes import BoostedProbes, measure_v, score_reader
from unmask.attacks.queries.one_head.probe_scale import read_first
from unmask.attacks.queries.profile import probe_oracle
from unmask.linalg.heads import HeadWeights


def first_of(heads, **options):
    """The place, the values, the exact values, and the queries of the first column."""
    evidence = oracle_of(heads, **options)
    generator = torch.Generator().manual_seed(0)
    profile = probe_oracle(evidence, generator)
    reader = score_reader(evidence, profile, measure_v(evidence, profile))
    probes = BoostedProbes.random(reader.v, generator)
    before = evidence.ledger.num_asked
    found = read_first(reader, probes, torch.eye(evidence.width, dtype=torch.float64), generator)
    queries = evidence.ledger.num_asked - before
    if found is None:
        return None, None, None, queries
    return found[0], found[1], probes.directions @ heads.W[0][:, found[0]], queries


@pytest.mark.parametrize("factor", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_a_column_takes_d_queries_over_five_decades(factor):
    for seed in range(6):
        head = random_head(24, seed)
        scaled = HeadWeights(W=factor * head.W, v=head.v)
        place, values, exact, queries = first_of(scaled)
        assert (place, queries) == (0, 24)
        # The pilot has lost as many digits as W is smaller; all others are as good as at scale 1.
        assert (values - exact).abs().max() <= 1e-14
        assert (values - exact)[8:].abs().max() <= 1e-13 * factor


@pytest.mark.parametrize("factor", [1e-9, 1e3, 1e6])
def test_other_scales_cost_a_few_queries_more(factor):
    head = random_head(24)
    scaled = HeadWeights(W=factor * head.W, v=head.v)
    place, values, exact, queries = first_of(scaled)
    assert place == 0
    assert 24 < queries <= 24 + 8
    assert torch.allclose(values, exact, rtol=0, atol=1e-13 * factor)


def test_few_digits_are_not_wasted_on_the_search():
    head = random_head(24)
    scaled = HeadWeights(W=1e-4 * head.W, v=head.v)
    _, values, exact, queries = first_of(scaled, dtype=torch.float32)
    assert queries <= 24 + 6
    assert (values - exact).norm() <= 3e-6 * exact.norm()


def test_a_column_of_zeros_is_passed_over():
    head = random_head(12)
    head.W[0][:, 0] = 0
    place, values, exact, _ = first_of(head)
    assert place > 0
    assert torch.allclose(values, exact, rtol=0, atol=1e-13)


def test_nothing_is_seen_of_a_zero_matrix():
    head = random_head(12)
    place, *_, queries = first_of(HeadWeights(W=0 * head.W, v=head.v))
    assert place is None
    assert queries < 100


def test_what_is_readable_at_no_scale_is_not_a_number():
    head = random_head(12)
    evidence = oracle_of(head)
    generator = torch.Generator().manual_seed(0)
    profile = probe_oracle(evidence, generator)
    reader = score_reader(evidence, profile, -head.v[0])
    found = read_first(reader, BoostedProbes.random(reader.v, generator), torch.eye(12).double(), generator)
    assert found is not None
    assert found[1].isnan().all()
