"""Atoms under errors of their own size: all of them where errors allow, none of noise, and how well they explain."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from unmask.linalg.weighted_pursuit import WeightedPursuit, find_start

D, N, M = 60, 500, 8


def alike(seed: int = 0) -> torch.Tensor:
    """Atoms that are much alike, as the vectors of a vocabulary are: a common part and uneven coordinates."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(0, -2, D)
    return (torch.randn(N, D, generator=draw) * sizes + 0.5 * torch.randn(D, generator=draw) * sizes).double()


def measure(atoms: torch.Tensor, used: list[int], seed: int = 1, unknown: float = 0.2):
    """Columns that are combinations of some atoms, with errors of 0.1 % to 10 % of an entry, and some not known."""
    draw = torch.Generator().manual_seed(seed)
    exact = atoms[used].T @ torch.randn(len(used), M, generator=draw).double()
    sigma = exact.abs().clamp_min(1e-3 * exact.abs().mean()) * 10 ** (
        -3 + 2 * torch.rand(D, M, generator=draw).double()
    )
    noisy = exact + sigma * torch.randn(D, M, generator=draw).double()
    return noisy, torch.where(torch.rand(D, M, generator=draw) < unknown, math.inf, sigma)


@pytest.mark.parametrize("num_used", [1, 5, 10])
def test_all_atoms_and_no_others(num_used):
    atoms, used = alike(), list(range(7, 7 + num_used))
    matrix, sigma = measure(atoms, used)
    found = WeightedPursuit(atoms, matrix, sigma, 5.0).search(40, find_start(atoms, matrix, sigma, 40))
    assert sorted(found.chosen) == used
    assert not found.is_full
    assert 0.5 < found.misfit < 1.5
    assert bool((found.gains > found.rivals).all())


def test_errors_that_are_larger_than_said_show():
    atoms = alike()
    matrix, sigma = measure(atoms, [3, 4, 5])
    assert WeightedPursuit(atoms, matrix, sigma / 10, 5.0).search(30).misfit > 2


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_made_of_nothing(seed):
    atoms, draw = alike(), torch.Generator().manual_seed(seed)
    sigma = torch.rand(D, M, generator=draw).double() + 0.1
    noise = sigma * torch.randn(D, M, generator=draw).double()
    found = WeightedPursuit(atoms, noise, sigma, 5.0).search(30, find_start(atoms, noise, sigma, 30))
    assert found.chosen == ()
    assert 0.7 < found.misfit < 1.3


def test_a_matrix_that_is_made_of_no_atoms_is_not_explained():
    atoms, draw = alike(), torch.Generator().manual_seed(0)
    matrix = torch.randn(D, M, generator=draw).double()
    found = WeightedPursuit(atoms, matrix, torch.full((D, M), 1e-3).double(), 5.0).search(30)
    assert found.is_full or found.misfit > 100


def test_a_search_ends_where_all_atoms_that_may_follow_cannot_explain_the_rest():
    atoms = alike()
    matrix, sigma = measure(atoms, list(range(30)), unknown=0.0)
    atoms[:, -5:] = 0.0  # the rest lies where no atom is
    matrix[-5:], sigma[-5:] = 1e9, 1.0
    found = WeightedPursuit(atoms, matrix, sigma, 5.0).search(50)
    assert found.is_full
    assert len(found.chosen) < 20


def test_a_wrong_start_is_put_back():
    atoms, used = alike(), [3, 4, 5, 6]
    matrix, sigma = measure(atoms, used)
    found = WeightedPursuit(atoms, matrix, sigma, 5.0).search(40, [3, 4, 5, 6, 100, 101, 102, 103, 104])
    assert sorted(found.chosen) == used


def test_a_near_atom_is_a_rival():
    atoms, used = alike(), [3, 4, 5]
    atoms[400] = atoms[3] + 1e-4 * atoms[77]
    matrix, sigma = measure(atoms, used)
    found = WeightedPursuit(atoms, matrix, sigma, 5.0).search(40, used)
    margins = dict(zip(found.chosen, (found.gains - found.rivals).tolist(), strict=True))
    near = margins.get(3, margins.get(400))
    assert near is not None
    assert near < 1e-2 * min(margins[4], margins[5])


def test_columns_of_which_nothing_is_known_are_no_start():
    atoms = normalize(alike(), dim=1)
    unknown = torch.full((D, M), math.inf, dtype=torch.float64)
    assert find_start(atoms, torch.ones(D, M).double(), unknown, 10) == []
    found = WeightedPursuit(atoms, torch.ones(D, M).double(), unknown, 5.0).search(10)
    assert found.chosen == ()


def test_columns_that_are_zero_for_the_most_part_are_no_start():
    atoms = normalize(alike(), dim=1)
    matrix = torch.zeros(D, M, dtype=torch.float64)
    matrix[0] = 1.0
    assert find_start(atoms, matrix, torch.ones(D, M).double(), 10) == []
