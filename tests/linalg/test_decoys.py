"""Decoys lie as near to rows as rows lie to each other, are none of them, and have their covariance."""

import torch

from unmask.linalg.decoys import make_decoys


def rows(v=800, d=40, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(v, d, generator=draw) * torch.logspace(0, -2, d) + 0.5


def nearest(points, others):
    distances = torch.cdist(points, others)
    return torch.where(distances < 1e-6, torch.inf, distances).amin(1)


def test_they_are_as_near_as_rows_are():
    given = rows()
    made = make_decoys(given, 300, torch.Generator().manual_seed(1))
    assert made.shape == (300, 40)
    scale = given.std(0)
    ratio = nearest(made / scale, given / scale).median() / nearest(given / scale, given / scale).median()
    assert 0.8 < float(ratio) < 1.2


def test_equal_rows_do_not_get_an_equal_decoy():
    """Every tenth row is the next one's copy: its decoy is half the usual distance away, not at it."""
    given = rows(v=200)
    given[::10] = given[1::10]
    made = make_decoys(given, 200, torch.Generator().manual_seed(1))
    assert float(torch.cdist(made, given).amin(1).min()) > 1e-3


def test_no_more_than_rows_and_equal_seeds_give_equal_ones():
    given = rows(v=50)
    made = [make_decoys(given, 1000, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert len(made[0]) == 50
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
