import pytest
import torch
from tests.attacks.queries.many_heads.test_circle_point import even_part
from tests.attacks.queries.random_heads import added, random_head

from unmask.attacks.queries.many_heads.circle_columns import CircleColumns, choose_probes
from unmask.attacks.queries.many_heads.circle_point import find_point
from unmask.attacks.run import Run


def learned_columns(heads, **options):
    even, generator = even_part(heads, max_norm=14.0, **options)
    columns = CircleColumns(even, find_point(even, even.longest(generator), generator), Run())
    columns.learn()
    return columns


def worst(W, heads):
    both = torch.cat([W, -W])
    return max(float((both - each).norm(dim=(1, 2)).min() / each.norm()) for each in heads.W)


@pytest.fixture(scope="module")
def heads():
    return random_head(8, num_heads=2)


def test_columns_of_all_heads(heads):
    assert worst(learned_columns(heads).W, heads) < 1e-10


def test_a_second_pass_and_one_fit_of_everything_make_noise_count_less(heads):
    columns = learned_columns(heads, after=added(1e-4))
    once = worst(columns.W, heads)
    columns.learn_again()
    again = worst(columns.W, heads)
    columns.refine_together()
    assert again < once
    assert worst(columns.W, heads) < 1.2 * again


def test_probes_are_long_and_leave_heads_between_on_and_off():
    w = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U = choose_probes(Run(), w, 50.0)
    assert float(U.norm(dim=1).max()) <= 50
    assert float(U.norm(dim=1).min()) > 40
    assert float((U @ w.T).std()) < 3
