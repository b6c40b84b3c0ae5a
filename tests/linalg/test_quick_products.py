"""Fewer digits inside the context, and only there."""

from __future__ import annotations

import pytest
import torch

from unmask.linalg.quick_products import multiply_quickly, screens_in_few_digits


def test_the_precision_is_lowered_inside_and_restored_afterwards():
    before = torch.get_float32_matmul_precision()
    with multiply_quickly():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_an_error_inside_restores_it_too():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), multiply_quickly():
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_a_cpu_keeps_all_digits():
    a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    with multiply_quickly():
        quick = a @ b
    assert not screens_in_few_digits(a)
    torch.testing.assert_close(quick, (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)
