"""Scores of tokens against the formulas that they stand for, written out."""

from __future__ import annotations

import torch

from unmask.attacks.outputs.prompts import ranking
from unmask.attacks.outputs.prompts.ranking import (
    LocalMap,
    direct_metric,
    leading_directions,
    linearised_scores,
    posterior,
)
from unmask.attacks.outputs.prompts.templates import TokenStates

WIDTH, VOCAB = 5, 30


def table(seed: int = 0) -> TokenStates:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return TokenStates(
        torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(WIDTH, generator=generator, dtype=torch.float64),
        factor @ factor.T + torch.eye(WIDTH, dtype=torch.float64),
    )


def differences(scores: torch.Tensor) -> torch.Tensor:
    """Scores are given up to a constant."""
    return scores - scores[0]


def test_the_direct_metric_is_mahalanobis():
    tokens, state = table(), torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    metric = direct_metric(tokens, ridge=0.0)
    ours = metric.scores((metric.whiten @ state)[None])[0]
    offsets = state - tokens.means(torch.arange(VOCAB))
    theirs = -0.5 * (offsets @ tokens.covariance.inverse() * offsets).sum(1)
    assert torch.allclose(differences(ours), differences(theirs), rtol=1e-4)


def test_leading_directions_are_those_in_which_tokens_differ_most(monkeypatch):
    """Fisher's discriminants: the generalised eigenvectors of the spread between tokens against that around them."""
    monkeypatch.setattr(ranking, "_WIDE", WIDTH)
    monkeypatch.setattr(ranking, "_LEADING_SHARE", 2)
    tokens = table()
    ours = leading_directions(direct_metric(tokens, ridge=0.0))
    assert torch.allclose(ours @ ours.T, torch.eye(WIDTH // 2, dtype=torch.float64))
    between = torch.cov(tokens.means(torch.arange(VOCAB)).T)
    values, vectors = torch.linalg.eig(torch.linalg.solve(tokens.covariance, between))
    theirs = vectors.real[:, values.real.argsort()[-(WIDTH // 2) :]]
    assert torch.allclose(ours.T @ (ours @ theirs), theirs, atol=1e-5)  # the same subspace


def test_few_entries_are_all_used():
    assert leading_directions(direct_metric(table())) is None


def test_linearised_scores_are_those_of_the_propagated_normal():
    tokens, generator = table(1), torch.Generator().manual_seed(4)
    point, at, state, shift = (torch.randn(WIDTH, generator=generator, dtype=torch.float64) for _ in range(4))
    J = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    ours = linearised_scores(tokens, shift, state, LocalMap(point, at, J), noise_variance=0.7)
    left_out = (ranking._LEFT_OUT * (state - at).norm()) ** 2 / WIDTH
    covariance = J @ tokens.covariance @ J.T
    covariance = covariance + (0.7 + left_out + ranking._RIDGE * covariance.diagonal().mean()) * torch.eye(WIDTH)
    means = at + (tokens.means(torch.arange(VOCAB)) + shift - point) @ J.T
    theirs = -0.5 * ((state - means) @ covariance.inverse() * (state - means)).sum(1)
    assert torch.allclose(differences(ours), differences(theirs), rtol=1e-6)


def test_directions_that_the_map_forgets_count_for_nothing():
    """A singular J: what it does not let through cannot move the order."""
    tokens, J = table(2), torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    near = LocalMap(torch.zeros(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64), J)
    state = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    scores = [linearised_scores(tokens, shift, state, near, 0.1) for shift in (state * 0, 9 * torch.eye(WIDTH)[4])]
    assert torch.allclose(differences(scores[0]), differences(scores[1]))


def test_a_prior_decides_between_equals():
    scores, prior = torch.zeros(3), torch.tensor([0.2, 0.5, 0.3]).log()
    assert int(posterior(scores, prior).argmax()) == 1
    assert int(posterior(torch.tensor([100.0, 0.0, 0.0]), prior).argmax()) == 0
