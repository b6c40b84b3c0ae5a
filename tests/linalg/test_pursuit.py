"""Atoms of a noise-free matrix: many more than it has columns, and none where it is made of none."""

import pytest
import torch
from torch.nn.functional import normalize

from unmask.linalg.pursuit import Pursuit, find_rivals, find_support, orthonormal, support_of

D, N = 60, 400


def atoms(seed: int = 0, num: int = N, d: int = D) -> torch.Tensor:
    return normalize(torch.randn(num, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1)


def matrix_of(rows: torch.Tensor, columns: int, seed: int = 1) -> torch.Tensor:
    weights = torch.randn(len(rows), columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.T @ weights


@pytest.mark.parametrize(("num_used", "columns"), [(1, 1), (5, 2), (12, 4), (25, 6), (30, 16)])
def test_atoms_are_found_beyond_the_number_of_columns(num_used, columns):
    dictionary = atoms()
    used = list(range(3, 3 + num_used))
    found = find_support(dictionary, orthonormal(matrix_of(dictionary[used], columns), 1e-6), 1e-8, 50, 1e-6)
    assert sorted(found.chosen) == used
    assert found.residual < 1e-8


def test_a_matrix_of_noise_is_not_explained():
    noise = torch.randn(D, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert find_support(atoms(), orthonormal(noise, 1e-6), 1e-8, 30, 1e-6).residual > 0.1


def test_matrices_that_share_their_atoms_add_up():
    """One column each tells little; eight matrices together tell all."""
    used, dictionaries = list(range(20)), [atoms(seed) for seed in range(8)]
    bases = [orthonormal(matrix_of(rows[used], 1, seed), 1e-6) for seed, rows in enumerate(dictionaries)]
    search = Pursuit(bases, 1e-8)
    search.add([rows[:200] for rows in dictionaries])
    search.add([rows[200:] for rows in dictionaries])
    while search.residual > 1e-8 and len(search.taken) < 40:
        search.take(search.best()[0])
    needed = torch.stack(
        [
            support_of(rows, range(len(search.taken)), basis).needs
            for rows, basis in zip(search.rows(), bases, strict=True)
        ]
    ).amax(0)
    assert {atom for atom, need in zip(search.taken, needed.tolist(), strict=True) if need > 1e-6} == set(used)
    assert search.num_atoms == N


def test_an_atom_is_taken_once():
    dictionary = atoms()
    search = Pursuit([orthonormal(matrix_of(dictionary[:10], 3), 1e-6)], 1e-12)
    search.add([dictionary])
    while (best := search.best())[1] > 0:
        search.take(best[0])
    assert sorted(search.taken) == list(range(10))


def test_nothing_is_best_where_nothing_is_left():
    dictionary = atoms()
    search = Pursuit([orthonormal(dictionary[:2].T, 1e-6)], 1e-8)
    search.add([dictionary])
    for atom in (0, 1):
        search.take(atom)
    assert search.residual < 1e-10
    assert search.best()[1] == 0.0


def test_a_need_is_what_is_lost_without_the_atom():
    dictionary = atoms()
    basis = orthonormal(matrix_of(dictionary[:6], 3), 1e-6)
    found = support_of(dictionary, range(6), basis)
    for index in range(6):
        others = [atom for atom in range(6) if atom != index]
        rest = support_of(dictionary, others, basis).residual * 3**0.5
        assert float(found.needs[index]) == pytest.approx(rest, rel=1e-6)


def test_a_rival_is_measured_as_if_it_stood_in_the_place():
    dictionary = atoms()
    near = normalize(dictionary[0] + 0.05 * dictionary[300], dim=0)
    dictionary = torch.cat([dictionary, near[None]])
    basis = orthonormal(matrix_of(dictionary[:6], 3), 1e-6)
    left = find_rivals(dictionary, support_of(dictionary, range(6), basis))
    by_hand = support_of(dictionary, [N, 1, 2, 3, 4, 5], basis).residual * 3**0.5
    assert float(left[0]) == pytest.approx(by_hand, rel=1e-6)
    assert float(left[0]) < 0.1 * float(left[1:].min())


def test_a_copy_of_an_atom_is_a_rival_that_leaves_nothing():
    dictionary = torch.cat([atoms(), atoms()[:1]])
    basis = orthonormal(matrix_of(dictionary[:4], 2), 1e-6)
    assert float(find_rivals(dictionary, support_of(dictionary, range(4), basis))[0]) < 1e-7


def test_columns_below_the_floor_are_left_out():
    matrix = torch.diag(torch.tensor([1.0, 1e-2, 1e-9]))
    assert orthonormal(matrix, 1e-6).shape == (3, 2)
