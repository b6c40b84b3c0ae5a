"""A run: equal seeds draw equal numbers, and its cost has the seconds since it began."""

from __future__ import annotations

import time

import torch

from unmask.attacks.run import Run


def test_equal_seeds_draw_equal_numbers():
    one, other, third = (torch.rand(4, generator=Run(seed).generator) for seed in (3, 3, 4))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)


def test_the_cost_has_the_seconds_and_what_was_counted():
    before = time.perf_counter()
    run = Run()
    cost = run.cost(candidates=7, forward_passes=2)
    assert 0 < cost.seconds <= time.perf_counter() - before
    assert (cost.candidates, cost.forward_passes, cost.queries) == (7, 2, 0)
