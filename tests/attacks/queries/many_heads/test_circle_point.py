import pytest
import torch
from tests.attacks.queries.random_heads import oracle_of, random_head

from unmask.attacks.queries.many_heads.circle_point import EvenPart, find_point, joint_equations
from unmask.attacks.queries.opening import open_layer
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.queries.resolution import NoPlane
from unmask.linalg.heads import HeadWeights


def even_part(heads, **options):
    run = QueryRun(evidence=oracle_of(heads, **options))
    run.probe()
    return EvenPart(open_layer(run).pairs, run.profile), run.generator


def test_the_even_part_is_even_and_blind_to_signs():
    heads = random_head(5, num_heads=2)
    even, generator = even_part(heads)
    U, y = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    assert torch.allclose(even(U, y[0]), even(-U, y[0]), atol=1e-13)
    turned, _ = even_part(HeadWeights(W=-heads.W, v=-heads.v))
    assert torch.allclose(even(U, y[0]), turned(U, y[0]), atol=1e-13)


@pytest.mark.parametrize("factor", [1e-2, 1.0, 50.0])
def test_the_length_of_tokens_follows_the_size_of_W(factor):
    heads = random_head(12, num_heads=3)
    even, generator = even_part(HeadWeights(W=factor * heads.W, v=heads.v))
    typical = float((factor * heads.W).norm(dim=(1, 2)).mean()) / 12
    assert 10 < typical * even.longest(generator) < 120  # scores on the circle


def test_the_bound_on_norms_is_kept():
    even, generator = even_part(random_head(12, num_heads=3), max_norm=10.0)
    assert even.longest(generator) <= 25


def test_all_heads_at_one_token():
    heads = random_head(8, num_heads=3)
    even, generator = even_part(heads, max_norm=12.0)
    point = find_point(even, even.longest(generator), generator)
    w = heads.W @ point.y
    assert len(point.v) == 3
    for v_h, w_h in zip(heads.v, w, strict=True):
        both = torch.cat([torch.cat([point.v, point.w], 1), -torch.cat([point.v, point.w], 1)])
        assert float((both - torch.cat([v_h, w_h])).norm(dim=1).min()) < 1e-9


def test_a_W_that_never_shows_is_told():
    heads = random_head(6, num_heads=2)
    even, generator = even_part(HeadWeights(W=1e-18 * heads.W, v=heads.v), max_norm=3.0)
    with pytest.raises(NoPlane):
        find_point(even, even.longest(generator), generator)


def test_the_jacobian_of_all_weights_is_the_slope():
    generator = torch.Generator().manual_seed(0)
    U, x, step = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((9, 3), (12,), (12,)))
    equations = joint_equations(U, torch.zeros(9, dtype=torch.float64), 2)
    slope = (equations(x + 1e-6 * step)[0] - equations(x - 1e-6 * step)[0]) / 2e-6
    assert torch.allclose(equations(x)[1] @ step, slope, atol=1e-8)
