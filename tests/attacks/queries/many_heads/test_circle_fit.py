import math

import pytest
import torch

from unmask.attacks.queries.many_heads.circle_fit import fit_circle

ANGLE = math.pi * (torch.arange(240, dtype=torch.float64) + 0.5) / 240


def values_of(heads):
    p, q, alpha, beta = heads
    cos, sin = ANGLE.cos()[:, None], ANGLE.sin()[:, None]
    return ((alpha * cos + beta * sin) * torch.tanh((p * cos + q * sin) / 2) / 2).sum(1)


def random_circle(num, seed):
    heads = torch.randn(4, num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([25 * heads[:2], heads[2:]])


def worst(found, heads):
    """Up to order and the sign of a head."""
    both = torch.cat([found.heads, -found.heads], dim=1)
    return max(float(((both - head[:, None]).norm(dim=0) / head.norm()).min()) for head in heads.T)


@pytest.mark.parametrize(("num", "seed"), [(1, 0), (2, 0), (4, 1), (6, 0)])
def test_the_number_of_heads_and_the_heads_are_found(num, seed):
    heads = random_circle(num, seed)
    values = values_of(heads)
    found = fit_circle(ANGLE, values, 1e-15 * float(values.abs().max()))
    assert found.heads.shape[1] == num
    assert worst(found, heads) < 1e-9


def test_noise_costs_digits_and_adds_no_head():
    heads = random_circle(3, 2)
    noise = 1e-4 * torch.randn(240, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = fit_circle(ANGLE, values_of(heads) + noise, 1e-4)
    assert found.heads.shape[1] == 3
    assert worst(found, heads) < 1e-2
    assert found.deviation < 2e-4


def test_opposite_multiples_are_two_heads():
    """W and −2 W cross at the same angle; their poles have other heights."""
    heads = random_circle(3, 0)
    heads[:2, 1] = -2 * heads[:2, 0]
    values = values_of(heads)
    found = fit_circle(ANGLE, values, 1e-15 * float(values.abs().max()))
    assert found.heads.shape[1] == 3
    assert worst(found, heads) < 1e-6


def test_values_of_no_heads_are_not_explained():
    chance = torch.randn(240, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert fit_circle(ANGLE, chance, 1e-6, max_heads=8) is None
    assert fit_circle(ANGLE, (8 * ANGLE).cos().abs(), 1e-9, max_heads=8) is None
