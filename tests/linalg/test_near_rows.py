"""Rows that no forward pass tells apart: against all distances, whatever the memory allows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.linalg.near_rows import near_rows

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def all_distances(matrix: torch.Tensor, rows: list[int], tolerance: float) -> dict[int, tuple[int, ...]]:
    """The slow, obvious version."""
    m = matrix.double()
    return {
        row: tuple(((m - m[row]).norm(dim=1) <= tolerance * m[row].norm()).nonzero().flatten().tolist()) for row in rows
    }


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 1), (40, 3), (200, 16), (100, 64)]),
    tolerance=st.sampled_from([0.0, 1e-6, 1e-2, 0.02, 0.3, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    budget=st.sampled_from([1, 4096, 2**28]),
)
def test_it_finds_what_all_distances_find(seed, shape, tolerance, dtype, budget):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(*shape, generator=generator, dtype=torch.float64)
    origin = torch.randint(0, shape[0], (shape[0],), generator=generator)
    steps = torch.tensor([0.0, 1e-8, 1e-3, 0.1, 1.0])[torch.randint(0, 5, (shape[0],), generator=generator)]
    matrix = (matrix[origin] + steps[:, None] * matrix).to(dtype)  # copies, near copies and strangers
    rows = torch.randperm(shape[0], generator=generator)[:30].tolist()
    assert near_rows(matrix, rows, tolerance, budget) == all_distances(matrix, sorted(rows), tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_rows_are_found_and_nothing_else(device):
    matrix = torch.randn(5000, 64, generator=torch.Generator().manual_seed(1)).to(device)
    matrix[[7, 4000]] = matrix[11].clone()
    matrix[12] = matrix[11] * (1 + 1e-4)
    assert near_rows(matrix, torch.tensor([4000, 12, 11], device=device), 0.0) == {
        11: (7, 11, 4000),
        12: (12,),
        4000: (7, 11, 4000),
    }
    assert near_rows(matrix, [11], 2e-4)[11] == (7, 11, 12, 4000)
    assert all(
        len(found) == (3 if row in (7, 11, 4000) else 1) for row, found in near_rows(matrix, range(5000), 1e-6).items()
    )


def test_zero_rows_are_equal_to_zero_rows_alone():
    matrix = torch.zeros(4, 3)
    matrix[2] = 1e-30
    assert near_rows(matrix, [0, 2], 0.5) == {0: (0, 1, 3), 2: (2,)}


def test_no_rows_no_answer():
    assert near_rows(torch.randn(3, 2), [], 0.1) == {}


@pytest.mark.parametrize(
    ("matrix", "rows", "tolerance", "words"),
    [
        (torch.zeros(3), [0], 0.1, "a matrix"),
        (torch.zeros(3, 2), [3], 0.1, "0…2"),
        (torch.zeros(3, 2), [-1], 0.1, "0…2"),
        (torch.zeros(3, 2), [0], -0.1, "tolerance"),
        (torch.zeros(3, 2), [0], float("nan"), "tolerance"),
    ],
)
def test_mistakes_are_named(matrix, rows, tolerance, words):
    with pytest.raises(InputError, match=words):
        near_rows(matrix, rows, tolerance)
