"""The Jacobian of attending rows against the residual that it is the derivative of; probes of a few hidden units."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.attacks.gradients.encoder.test_relaxation import random_weights, relaxation_of, weights_of
from tests.attacks.gradients.encoder_batches import BATCH, as_places, classified, problem_of

from unmask.attacks.gradients.encoder.attending_rows import probe_layer
from unmask.attacks.gradients.encoder.problem import Problem

VANISHES = 1e-4  # as of all units


@pytest.fixture(scope="module")
def problem(tiny_bert) -> Problem:
    return problem_of(tiny_bert, classified(tiny_bert))


@torch.no_grad()
def test_the_jacobian_by_the_slope_of_the_taylor_error(problem):
    """‖r(w + t·u) − r(w) − t·J·u‖ falls with t²."""
    relaxation = relaxation_of(problem)
    rows = relaxation.rows(as_places(problem.places, BATCH[0])[:3])
    weights, direction = random_weights(relaxation) + 0.1, random_weights(relaxation, seed=1) - 0.5
    start, jacobian = rows.linearise_at(weights)
    steps = torch.tensor([1e-1, 1e-2, 1e-3], dtype=torch.float64)
    errors = [rows.residual(weights + t * direction) - start - t * jacobian.apply(direction) for t in steps]
    logs = torch.stack([error.norm() for error in errors]).log10()
    for slope in (logs[:-1] - logs[1:]).tolist():  # a decade of t
        assert slope == pytest.approx(2, abs=0.1)


@torch.no_grad()
def test_the_jacobian_by_central_differences(problem):
    relaxation = relaxation_of(problem, num_probes=3)
    rows = relaxation.rows(as_places(problem.places, BATCH[0])[:2])
    weights, size = random_weights(relaxation) + 0.1, 1e-5
    start, jacobian = rows.linearise_at(weights)
    torch.testing.assert_close(start, rows.residual(weights))
    for place in range(0, len(weights), 7):
        moved = torch.zeros_like(weights)
        moved[place] = size
        slope = (rows.residual(weights + moved) - rows.residual(weights - moved)) / (2 * size)
        # Differences are rounded by 1e-16/size and miss a term of size².
        torch.testing.assert_close(jacobian.columns(torch.tensor([place]))[:, 0], slope, atol=1e-8, rtol=1e-6)


@torch.no_grad()
def test_products_are_those_of_the_matrix_that_is_written_out(problem):
    relaxation = relaxation_of(problem)
    weights = random_weights(relaxation) + 0.1
    _, jacobian = relaxation.rows(as_places(problem.places, BATCH[0])[:3]).linearise_at(weights)
    dense = jacobian.dense()
    residual = torch.randn(len(dense), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(jacobian.apply(weights), dense @ weights)
    torch.testing.assert_close(jacobian.pull_back(residual), dense.T @ residual)
    some = torch.tensor([3, 0, 5])
    torch.testing.assert_close(jacobian.columns(some), dense[:, some])
    assert jacobian.column_norm == pytest.approx(float(dense.norm(dim=0).square().mean().sqrt()), rel=0.5)


@torch.no_grad()
def test_probes_of_a_few_hidden_units_vanish_on_the_batch_and_on_nothing_else(problem):
    assert problem.down is not None
    layer = probe_layer(problem.precise, problem.down, 4, torch.Generator().manual_seed(0), is_hidden=True)
    assert layer.model is not None
    assert len(layer.probes) == problem.down.span.rank + 4 < problem.down.span.width
    relaxation = replace(relaxation_of(problem), probed=[layer])
    for text in BATCH:
        places = as_places(problem.places, text)
        rows = relaxation.rows(places)
        right, wrong = (rows.residual(w).norm() for w in (weights_of(relaxation, places), random_weights(relaxation)))
        assert float(right) < VANISHES * float(wrong)


def test_all_units_are_kept_where_most_are_needed(problem):
    assert problem.down is not None
    room = problem.down.span.width - problem.down.span.rank
    layer = probe_layer(problem.precise, problem.down, room, torch.Generator().manual_seed(0), is_hidden=True)
    assert layer.model is None
    assert layer.probes.shape == (problem.down.span.width, room)
