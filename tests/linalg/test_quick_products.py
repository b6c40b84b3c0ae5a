"""Fewer digits inside the context, and only there."""

from __future__ import annotations

import pytest
import torch

from unmask.linalg.quick_products import multiply_quickly


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
