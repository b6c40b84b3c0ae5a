"""Fewer digits inside the context, and only there."""

from __future__ import annotations

import pytest
import torch

from unmask.linalg import quick_products
from unmask.linalg.quick_products import multiply_quickly, screens_in_few_digits


@pytest.mark.parametrize(
    ("large", "has_tiles", "inside"), [(False, True, "high"), (True, True, "medium"), (True, False, "high")]
)
def test_the_precision_is_lowered_inside_and_restored_afterwards(monkeypatch, large, has_tiles, inside):
    monkeypatch.setattr(quick_products, "_has_tiles", lambda: has_tiles)
    before = torch.get_float32_matmul_precision()
    with multiply_quickly(large):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == before


def test_an_error_inside_restores_it_too():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), multiply_quickly():
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def relative_error(large: bool) -> float:
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    with multiply_quickly(large):
        quick = a @ b
    right = a.double() @ b.double()
    return float((quick - right).norm() / right.norm())


def test_a_cpu_keeps_all_digits_of_small_matrices():
    assert not screens_in_few_digits(torch.ones(3, 3))
    assert relative_error(large=False) < 1e-6


def test_a_cpu_with_tiles_keeps_two_of_large_ones_and_says_so():
    rows = torch.ones(3, 3)
    assert not screens_in_few_digits(rows.double(), large=True)
    few = screens_in_few_digits(rows, large=True)
    assert few == quick_products._has_tiles()
    assert (1e-4 < relative_error(large=True) < 1e-2) if few else (relative_error(large=True) < 1e-6)


def test_a_torch_that_does_not_tell_what_the_cpu_can_has_no_tiles(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not quick_products._has_tiles.__wrapped__()
