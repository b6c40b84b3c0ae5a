"""Starts and searches: reproducible, of the right size, and all roots of a layer with three."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.outputs.attention_layers import random_layer

from unmask.attacks.outputs.layer_inputs.problem import AttentionProblem, pose
from unmask.attacks.outputs.layer_inputs.starts import (
    Search,
    join_searches,
    random_starts,
    search_in_batches,
    search_without_matrices,
)

# Thousands of operations on small matrices: threads cost more than they bring.
pytestmark = pytest.mark.usefixtures("one_thread")


def problem_of(*layer) -> AttentionProblem:
    return pose(random_layer(*layer)[0]).problem()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("unmixed", [True, False])
def test_starts_are_reproducible_and_not_far_longer_than_the_output(unmixed):
    problem = problem_of("pd", 8, 16)
    starts = random_starts(problem, 30, generator(), unmixed=unmixed)
    assert torch.equal(starts, random_starts(problem, 30, generator(), unmixed=unmixed))
    assert not torch.equal(starts, random_starts(problem, 30, generator(1), unmixed=unmixed))
    lengths = starts.norm(dim=1) / problem.Y.norm()
    # the far ones are up to 6 times as long, a norm of 64 normal numbers spreads by 9 %
    assert 0.5 < float(lengths.min()) <= float(lengths.max()) < 8


def test_unmixed_starts_are_convex_combinations_backwards():
    """F⁻¹Y with rows of F adding up to 1 keeps the sums of barycentric coordinates: an output of equal rows stays."""
    problem = problem_of("pd", 3, 5)
    equal = AttentionProblem(problem.W, problem.Y[:1].expand(3, -1).contiguous(), problem.basis)
    starts = random_starts(equal, 9, generator())[2::3].reshape(3, 3, -1)
    assert torch.allclose(starts, equal.Y.expand_as(starts), atol=1e-9)


def test_both_searches_find_the_input_of_a_definite_layer():
    evidence, X = random_layer("pd", 4, 8)
    problem = pose(evidence).problem()
    size = float(problem.Y.norm())
    starts = random_starts(problem, 12, generator(), unmixed=False)
    for search in (
        search_in_batches(problem, starts, size, 1e-12 * size, 60),
        search_without_matrices(problem, starts, 1e-12 * size, 60),
    ):
        assert len(search.roots) == 1
        assert search.power > 0.8
        assert torch.allclose(problem.lift(search.roots[0]), X, atol=1e-9)


def test_searches_are_joined_in_order():
    a, b = torch.ones(2).double(), torch.zeros(2).double()
    both = join_searches([Search((a,), 0, 0), Search((b, a), 10, 7)], size=1.0)
    assert torch.equal(both.roots[0], a)
    assert len(both.roots) == 2
    assert both.power == 0.7
    assert Search((), 0, 0).power == 0
