"""The search: all atoms of two to five steps and no others; destroyed steps are never explained."""

import pytest
import torch
from tests.linalg.adam_problems import NUM_ATOMS, make_atoms, make_problem
from tests.sampling import sample

from unmask.linalg.sparse_posterior import SparsePosterior
from unmask.linalg.support_growth import STRONG, grow_support

CASES = [(2, False), (3, False), (4, False), (3, True), (5, True)]


@sample("num_steps, begins_at_zero", CASES, [(2, False), (3, True)])
def test_all_atoms_and_no_others(num_steps, begins_at_zero):
    problem = make_problem(num_steps, begins_at_zero=begins_at_zero)
    found = grow_support(problem.posterior(), NUM_ATOMS)
    strong = {atom for atom, score in zip(found.chosen, found.scores.tolist(), strict=True) if score > 2 * STRONG}
    assert strong == problem.used  # rounding may add an atom whose score is next to nothing
    assert found.is_settled
    assert found.misfit < 30
    assert found.unexplained < 0.01
    assert float(found.scores.min()) > STRONG


def destroy(problem, kind, draw):
    measured = problem.measured
    if kind == "shuffled rows":
        return measured[torch.randperm(len(measured), generator=draw)]
    if kind == "shuffled columns":
        return torch.stack([column[torch.randperm(len(column), generator=draw)] for column in measured.T], 1)
    if kind == "random signs":
        return measured.abs() * torch.randn(measured.shape, generator=draw).sign()
    sizes = 1 - 0.02 * torch.rand(measured.shape, generator=draw).double()
    return problem.steps.top * sizes * torch.randn(measured.shape, generator=draw).sign()


@pytest.mark.parametrize("num_seeds", [1, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["shuffled rows", "shuffled columns", "random signs", "noise"])
def test_destroyed_steps_are_not_explained(kind, num_seeds):
    for seed in range(num_seeds):
        problem = make_problem(2 + seed % 3, seed=seed)
        draw = torch.Generator().manual_seed(seed)
        found = grow_support(problem.posterior(destroy(problem, kind, draw)), NUM_ATOMS)
        assert found.unexplained > 0.1
        assert not found.is_sharp


@pytest.mark.parametrize("num_seeds", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_another_dictionary_does_not_explain_the_steps(num_seeds):
    for seed in range(num_seeds):
        problem = make_problem(2 + seed % 3, seed=seed)
        other = make_atoms(torch.Generator().manual_seed(1000 + seed))
        layers = [slice(0, 8), slice(8, 16)]
        posterior = SparsePosterior(other, problem.measured, problem.sigma, problem.steps, layers)
        found = grow_support(posterior, len(other))
        assert len(other) == NUM_ATOMS
        assert found.unexplained > 0.1
        assert not found.is_sharp
