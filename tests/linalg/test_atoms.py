"""Which atoms a noisy matrix is made of: all that are strong, none that is noise, near ones told apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.linalg.atoms import chi_square_score, dictionary_gains, explain, joint_basis, least_gain, rival_gains

V, D, M = 800, 60, 120
NOTHING = torch.zeros(D, 0, dtype=torch.float64)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dictionary(seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(normal(V, D, seed=seed), dim=1)


def mixture(atoms: Tensor, chosen: list[int], size: float, seed: int = 1) -> Tensor:
    """White noise of variance one, and atoms with rows of norm `size`."""
    rows = torch.nn.functional.normalize(normal(len(chosen), M, seed=seed), dim=1)
    return atoms[chosen].T @ (size * rows) + normal(D, M, seed=seed + 50)


@settings(max_examples=20)
@given(seed=st.integers(0, 999), count=st.integers(1, 25), size=st.sampled_from([40.0, 1e3, 1e6]))
def test_strong_atoms_are_chosen_and_no_others(seed, count, size):
    atoms = dictionary(seed)
    chosen = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:count].tolist()
    explanation = explain(atoms.float(), mixture(atoms, chosen, size, seed + 1), NOTHING, score=5.0)
    assert set(explanation.chosen) == set(chosen)
    assert not explanation.is_full


@settings(max_examples=30)
@given(seed=st.integers(0, 9999))
def test_noise_alone_explains_nothing(seed):
    """Negative control: 800 gains above score 5 happen once in 4,000 matrices."""
    assert not explain(dictionary(), normal(D, M, seed=seed), NOTHING, score=5.0).chosen


def test_a_signal_of_no_atoms_fills_the_space():
    """Negative control: few directions that no atom has need as many atoms as there is room for."""
    matrix = normal(D, 10, seed=1) @ (1e4 * normal(10, M, seed=2)) + normal(D, M, seed=3)
    assert explain(dictionary(), matrix, NOTHING, score=5.0).is_full


def test_below_the_edge_of_the_spectrum_atoms_are_still_seen():
    """A row of norm 15 in noise whose largest singular value is about √60 + √120 = 18.7."""
    atoms = dictionary()
    assert explain(atoms, mixture(atoms, [3, 77], 15.0), NOTHING, score=5.0).chosen in ((3, 77), (77, 3))


def test_near_atoms_are_told_apart():
    atoms = dictionary()
    atoms[5] = torch.nn.functional.normalize(atoms[4] + 0.3 * normal(D, seed=8) / D**0.5, dim=0)
    for chosen in ([4], [5], [4, 5]):
        assert sorted(explain(atoms, mixture(atoms, chosen, 200.0), NOTHING, score=5.0).chosen) == chosen


def test_nuisance_is_explained_first():
    atoms = dictionary()
    nuisance = torch.linalg.qr(normal(D, 4, seed=9))[0]
    matrix = mixture(atoms, [1, 2, 3], 50.0) + nuisance @ (1e4 * normal(4, M, seed=10))
    assert set(explain(atoms, matrix, nuisance, score=5.0).chosen) == {1, 2, 3}


def test_a_false_start_is_put_back_and_a_true_one_kept():
    atoms = dictionary()
    matrix = mixture(atoms, [1, 2, 3], 50.0)
    assert set(explain(atoms, matrix, NOTHING, score=5.0, start=[3, 10, 11]).chosen) == {1, 2, 3}


def test_equal_atoms_are_chosen_once():
    atoms = dictionary()
    atoms[10] = atoms[1]
    explanation = explain(atoms, mixture(atoms, [1, 2], 50.0), NOTHING, score=5.0, start=[1, 10])
    assert len(explanation.chosen) == 2


def test_gains_are_those_of_least_squares():
    """Against the slow way: how much less is left once an atom is added."""
    atoms, matrix = dictionary(), normal(D, M, seed=4)
    basis = joint_basis(atoms[[7, 8]], NOTHING)
    gains = dictionary_gains(atoms[:20], matrix @ matrix.T, basis)

    def left(rows: Tensor) -> float:
        return float((matrix - rows.T @ torch.linalg.lstsq(rows.T, matrix).solution).square().sum())

    for index in (0, 3, 19):
        assert float(gains[index]) == pytest.approx(left(atoms[[7, 8]]) - left(atoms[[7, 8, index]]), rel=1e-6)
    assert float(gains[7]) == 0  # nothing of it is left outside


def test_scores_of_chi_square_are_normal():
    gains = normal(20_000, 50, seed=0).square().sum(1)
    scores = chi_square_score(gains, 50)
    assert float(scores.mean()) == pytest.approx(0, abs=0.03)
    assert float(scores.std()) == pytest.approx(1, abs=0.03)
    assert float(chi_square_score(torch.tensor([least_gain(5.0, 50)]), 50)) == pytest.approx(5.0, rel=1e-5)


# Rivals


def test_a_rival_is_what_explaining_with_it_instead_would_gain():
    """Against the definition: the other atom's gain outside of all chosen ones but the one that it replaces."""
    atoms, chosen = dictionary(), [3, 17, 25]
    matrix = mixture(atoms, chosen, 60.0)
    nuisance = torch.linalg.qr(normal(D, 2, seed=7))[0]
    found = explain(atoms, matrix, nuisance, 5.0)
    rivals = rival_gains(atoms, found, matrix)
    assert set(found.chosen) == set(chosen)
    for place, atom in enumerate(found.chosen):
        others = [other for other in chosen if other != atom]
        gains = dictionary_gains(atoms, matrix @ matrix.T, joint_basis(atoms[others], nuisance))
        gains[chosen] = 0
        assert float(rivals[place]) == pytest.approx(float(gains.max()), rel=1e-9)
        assert float(found.gains[place]) > float(rivals[place])


def test_a_twin_of_an_atom_is_a_rival_of_equal_gain():
    atoms = dictionary()
    twins = torch.cat([atoms, atoms[:1]])
    matrix = mixture(atoms, [0], 60.0)
    found = explain(twins, matrix, NOTHING, 5.0)
    assert len(found.chosen) == 1
    assert float(rival_gains(twins, found, matrix)[0]) == pytest.approx(float(found.gains[0]), rel=1e-9)
