"""Least squares in a box against scipy's exact solver, and the simplex against what defines a nearest point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear
from torch import Tensor

from unmask.linalg.box_least_squares import DenseSystem, box_least_squares, project_to_simplex

quick = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)
# Sums and differences of a few numbers of size 1 in float64.
FLOAT64_ZERO = 1e-12
EXACT = {"tolerance": 1e-15, "least_gain": 1e-15}


def wide_system(seed: int, num_equations: int, num_unknowns: int) -> Tensor:
    """Random columns of norm 1, as the docstring asks for."""
    matrix = torch.randn(
        num_equations, num_unknowns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return matrix / matrix.norm(dim=0)


def sparse_weights(seed: int, num_unknowns: int, num_ones: int) -> Tensor:
    """Zeros and ones: both bounds of the box."""
    weights = torch.zeros(num_unknowns, dtype=torch.float64)
    weights[torch.randperm(num_unknowns, generator=torch.Generator().manual_seed(seed))[:num_ones]] = 1
    return weights


def box(num_unknowns: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_unknowns, dtype=torch.float64), torch.ones(num_unknowns, dtype=torch.float64)


def objective(matrix: Tensor, values: Tensor, weights: Tensor, start: Tensor, damping: float) -> float:
    return float((matrix @ weights - values).square().sum() + damping * (weights - start).square().sum())


def by_scipy(matrix: Tensor, values: Tensor, start: Tensor, bounds: tuple[Tensor, Tensor], damping: float) -> Tensor:
    """The slow, exact one: damping as further rows √damping·w = √damping·start."""
    rows = np.concatenate([matrix.numpy(), damping**0.5 * np.eye(len(start))])
    wanted = np.concatenate([values.numpy(), damping**0.5 * start.numpy()])
    lower, upper = (bound.numpy() for bound in bounds)
    return torch.tensor(lsq_linear(rows, wanted, (lower, upper), method="bvls", tol=1e-14, max_iter=2000).x)


# ---- least squares in a box


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_equations", "num_unknowns"), [(12, 30), (20, 60), (30, 30)])
def test_the_objective_is_near_the_optimum_of_an_exact_solver(seed, num_equations, num_unknowns):
    """Noise on the equations, so that no weights in the box solve them and many end at a bound."""
    matrix = wide_system(seed, num_equations, num_unknowns)
    noise = torch.randn(num_equations, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 100))
    values = matrix @ sparse_weights(seed, num_unknowns, 4) + noise
    start = torch.full((num_unknowns,), 0.3, dtype=torch.float64)
    damping = 1e-3  # makes the optimum unique
    found = box_least_squares(DenseSystem(matrix), values, start, *box(num_unknowns), damping=damping)
    best = by_scipy(matrix, values, start, box(num_unknowns), damping)
    reached, optimum, begun = (objective(matrix, values, w, start, damping) for w in (found, best, start))
    assert optimum - FLOAT64_ZERO <= reached <= optimum + 1e-3 * (begun - optimum)


@pytest.mark.parametrize("seed", range(4))
def test_a_small_tolerance_gives_the_solution_of_an_exact_solver(seed):
    matrix = wide_system(seed, 12, 30)
    values = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 100))
    start = torch.full((30,), 0.3, dtype=torch.float64)
    found = box_least_squares(DenseSystem(matrix), values, start, *box(30), damping=1e-2, **EXACT)
    best = by_scipy(matrix, values, start, box(30), damping=1e-2)
    torch.testing.assert_close(found, best, atol=1e-6, rtol=0)  # scipy stops at 1e-14 of the cost, its square


@pytest.mark.parametrize("seed", range(4))
def test_a_sparse_solution_at_the_bounds_is_found_with_fewer_equations_than_unknowns(seed):
    """What the relaxation rests on. Of n unknowns at their bounds, random equations tell from n/2 on.

    Source: Donoho, Tanner, Counting the faces of randomly-projected hypercubes and orthants, arXiv 0807.3590.
    """
    matrix, weights = wide_system(seed, 80, 120), sparse_weights(seed, 120, 6)
    start = torch.full((120,), 0.25, dtype=torch.float64)
    found = box_least_squares(DenseSystem(matrix), matrix @ weights, start, *box(120))
    assert float((found - weights).abs().max()) < 0.01


def test_too_few_equations_have_many_solutions():
    """A third of n: every equation holds, and the weights are not those that made them."""
    matrix, weights = wide_system(0, 40, 120), sparse_weights(0, 120, 6)
    start = torch.full((120,), 0.25, dtype=torch.float64)
    found = box_least_squares(DenseSystem(matrix), matrix @ weights, start, *box(120))
    assert float((matrix @ (found - weights)).norm()) < 1e-2
    assert float((found - weights).abs().max()) > 0.1


@quick
@given(seeds, st.integers(1, 12), st.integers(1, 24))
def test_nothing_leaves_the_box(seed, num_equations, num_unknowns):
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randn(2, num_unknowns, dtype=torch.float64, generator=generator).sort(0).values
    start = 3 * torch.randn(num_unknowns, dtype=torch.float64, generator=generator)
    values = 3 * torch.randn(num_equations, dtype=torch.float64, generator=generator)
    found = box_least_squares(DenseSystem(wide_system(seed, num_equations, num_unknowns)), values, start, *ends)
    assert bool(((found >= ends[0]) & (found <= ends[1])).all())


def test_weights_whose_bounds_meet_stay_there():
    """Anchors are fixed by a box of width 0; the others make up for what they cannot."""
    matrix = wide_system(0, 20, 20)
    weights = sparse_weights(0, 20, 5)
    lower, upper = box(20)
    lower[:3] = upper[:3] = weights[:3]
    found = box_least_squares(DenseSystem(matrix), matrix @ weights, torch.full_like(lower, 0.5), lower, upper, **EXACT)
    assert torch.equal(found[:3], weights[:3])
    # A random square matrix has singular values down to 1e-2 or so, and the damping holds 1e-6 against their squares.
    torch.testing.assert_close(found, weights, atol=1e-2, rtol=0)


def test_equations_that_say_nothing_leave_the_start():
    """argmin damping·‖w − start‖²."""
    start = torch.tensor([-0.5, 0.2, 0.7, 1.5], dtype=torch.float64)
    zero = torch.zeros(3, 4, dtype=torch.float64)
    found = box_least_squares(DenseSystem(zero), zero[:, 0], start, *box(4), damping=1.0)
    torch.testing.assert_close(found, start.clamp(0, 1), atol=FLOAT64_ZERO, rtol=0)


def test_float32_agrees_with_float64():
    matrix, weights = wide_system(0, 80, 120), sparse_weights(0, 120, 6)
    start = torch.full((120,), 0.25, dtype=torch.float64)
    arguments = (matrix, matrix @ weights, start, *box(120))
    found = box_least_squares(DenseSystem(matrix.float()), *(argument.float() for argument in arguments[1:]))
    assert found.dtype is torch.float32
    # 120 iterations of roundings of 6e-8, over a ridge of 0.03.
    torch.testing.assert_close(
        found.double(), box_least_squares(DenseSystem(matrix), *arguments[1:]), atol=1e-4, rtol=0
    )


def test_arguments_are_left_alone():
    matrix, start = wide_system(0, 5, 8), torch.full((8,), 2.0, dtype=torch.float64)
    arguments = (matrix, matrix[:, 0].clone(), start, *box(8))
    before = [argument.clone() for argument in arguments]
    box_least_squares(DenseSystem(matrix), *arguments[1:])
    assert all(torch.equal(argument, old) for argument, old in zip(arguments, before, strict=True))


# ---- the simplex

# Numbers that are compared with 1: beyond 1e6 the sum's own rounding is what one sees.
entries = st.floats(-1e3, 1e3)
columns = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(entries, min_size=n, max_size=n), min_size=1, max_size=4)
)
ROUNDING = 1e-9  # of sums of numbers up to 1e3, and of products of two of them up to 1e6


def tensor(by_column: list[list[float]]) -> Tensor:
    return torch.tensor(by_column, dtype=torch.float64).T


@quick
@given(columns)
def test_columns_end_on_the_simplex(by_column):
    projected = project_to_simplex(tensor(by_column))
    assert float(projected.min()) >= 0
    torch.testing.assert_close(projected.sum(0), torch.ones(len(by_column)).double(), atol=ROUNDING, rtol=0)


@quick
@given(columns)
def test_columns_of_the_simplex_stay(by_column):
    once = project_to_simplex(tensor(by_column))
    torch.testing.assert_close(project_to_simplex(once), once, atol=ROUNDING, rtol=0)


@quick
@given(columns, seeds)
def test_no_point_of_the_simplex_is_nearer(by_column, seed):
    """p is the nearest point to x exactly if ⟨x − p, q − p⟩ ≤ 0 for every q of the simplex: all corners, and some q."""
    points = tensor(by_column)
    projected = project_to_simplex(points)
    corners = torch.eye(len(points), dtype=torch.float64)
    inside = torch.rand(len(points), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for q in torch.cat([corners, inside / inside.sum(0)], dim=1).T:
        angles = ((points - projected) * (q[:, None] - projected)).sum(0)
        assert float(angles.max()) <= 1e3 * ROUNDING


@quick
@given(columns, st.floats(-100, 100))
def test_a_common_shift_changes_nothing(by_column, shift):
    """It is orthogonal to the simplex."""
    points = tensor(by_column)
    torch.testing.assert_close(
        project_to_simplex(points + shift), project_to_simplex(points), atol=10 * ROUNDING, rtol=0
    )


@quick
@given(columns, st.randoms(use_true_random=False))
def test_the_order_of_entries_does_not_matter(by_column, random):
    points = tensor(by_column)
    order = random.sample(range(len(points)), len(points))
    torch.testing.assert_close(
        project_to_simplex(points[order]), project_to_simplex(points)[order], atol=ROUNDING, rtol=0
    )


@quick
@given(columns)
def test_each_column_is_projected_by_itself(by_column):
    together = project_to_simplex(tensor(by_column))
    for index, column in enumerate(by_column):
        assert torch.equal(together[:, [index]], project_to_simplex(tensor([column])))


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ([0.5, 0.5], [0.5, 0.5]),
        ([5.0, 0.0], [1.0, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.25] * 4),
        ([1.0, 0.5], [0.75, 0.25]),
        ([-7.0], [1.0]),
        ([0.9, 0.9, -3.0], [0.5, 0.5, 0.0]),
    ],
)
def test_projections_by_hand(point, expected):
    assert project_to_simplex(tensor([point]))[:, 0].tolist() == pytest.approx(expected, abs=FLOAT64_ZERO)


def test_half_of_a_large_random_column_is_cut_off():
    """Exactly the entries above the shift are kept: p = max(x − θ, 0) with one θ for the whole column."""
    points = torch.randn(1000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 1000
    projected = project_to_simplex(points)
    kept = projected > 0
    shifts = (points - projected)[kept]
    assert float(shifts.max() - shifts.min()) < FLOAT64_ZERO
    assert float(points[~kept].max()) <= float(shifts.mean()) + FLOAT64_ZERO


def test_more_equations_than_unknowns_give_the_same_as_the_same_equations_twice():
    matrix, start = wide_system(0, 30, 40), torch.full((40,), 0.5, dtype=torch.float64)
    values = matrix @ sparse_weights(0, 40, 10)
    half = 0.5**0.5
    twice = torch.cat([half * matrix, half * matrix]), torch.cat([half * values, half * values])
    wide = box_least_squares(DenseSystem(matrix), values, start, *box(40))
    tall = box_least_squares(DenseSystem(twice[0]), twice[1], start, *box(40))
    torch.testing.assert_close(tall, wide, rtol=1e-8, atol=1e-8)
