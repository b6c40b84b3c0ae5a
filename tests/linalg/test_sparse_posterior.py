"""The posterior behind Adam's steps: ranks of atoms that occur, scores, rivals, and what is left once all are held."""

import pytest
import torch
from tests.linalg.adam_problems import NUM_ATOMS, make_problem


@pytest.fixture(scope="module")
def problem():
    return make_problem(num_steps=3)


def settle(posterior, atoms, turns=20):
    posterior.replace_atoms(range(len(posterior.chosen)), atoms)
    for _ in range(turns):
        posterior.update_sites((24, 16), 0.8)
        posterior.solve()
        posterior.learn()
        posterior.solve()
    return posterior


def test_atoms_that_occur_rank_first(problem):
    scores = problem.posterior().rank()
    assert len(set(scores.topk(5).indices.tolist()) & problem.used) >= 3  # others lie near them
    absent = torch.tensor([atom for atom in range(len(scores)) if atom not in problem.used])
    assert abs(float(scores[absent].mean())) < 3


def test_the_right_atoms_explain_the_steps(problem):
    posterior = settle(problem.posterior(), sorted(problem.used))
    assert posterior.misfit() < 10
    assert posterior.largest_unexplained() < 0.01
    assert float(posterior.own_scores().min()) > 50
    assert float(posterior.compare_rivals()[0].min()) > 100
    scores = posterior.rank()
    assert bool(scores[sorted(problem.used)].isinf().all())
    assert float(scores.max()) < 8


def test_a_wrong_atom_has_no_score_of_its_own(problem):
    wrong = next(atom for atom in range(NUM_ATOMS) if atom not in problem.used)
    posterior = settle(problem.posterior(), [*sorted(problem.used), wrong])
    assert float(posterior.own_scores()[-1]) < 5 < float(posterior.own_scores()[:-1].min())


def test_the_right_atom_is_the_rival_of_a_near_one(problem):
    """A copy of a used atom with a little added stands in its place: the atom itself explains more."""
    first, *others = sorted(problem.used)
    posterior = problem.posterior()
    draw = torch.Generator().manual_seed(0)
    fake = NUM_ATOMS  # a decoy, overwritten
    own = posterior.dictionary[first]
    posterior.dictionary[fake] = own + 0.05 * own.abs().mean() * torch.randn(own.shape, generator=draw)
    settle(posterior, [fake, *others])
    margins, better = posterior.compare_rivals()
    assert float(margins[0]) < 0
    assert int(better[0]) == first


def test_sites_are_forgotten_but_atoms_are_not(problem):
    posterior = settle(problem.posterior(), sorted(problem.used), turns=4)
    misfits = posterior.column_misfits()
    is_worse = misfits > 2 * misfits.quantile(0.25)
    posterior.begin_again(range(1, len(posterior.chosen)))
    assert posterior.chosen == sorted(problem.used)[1:]
    forgotten = is_worse if bool(is_worse.any()) else ~is_worse
    assert float(posterior.unexplained[forgotten].min()) >= 0.3


def test_likely_atoms_are_ranked_as_all_are(problem, monkeypatch):
    """The sketch leaves out no atom that ranks high."""
    posterior = problem.posterior()
    everyone = posterior.rank()
    monkeypatch.setattr("unmask.linalg.sparse_posterior._LIKELY", 60)
    likely = posterior.rank()
    assert int(likely.isfinite().sum()) == 60
    assert likely.topk(8).indices.tolist() == everyone.topk(8).indices.tolist()


def test_nothing_chosen_is_no_error(problem):
    posterior = problem.posterior()
    assert len(posterior.own_scores()) == 0
    assert [len(part) for part in posterior.compare_rivals()] == [0, 0]
