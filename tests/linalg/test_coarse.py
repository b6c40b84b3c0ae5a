"""Coarse numbers, told by their values: the kind, and a variance that is that of the error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmask.linalg.coarse import (
    Coarseness,
    distance_to_cells,
    relative_rounding,
    rounding_variance,
    storage_of,
    storage_variance,
)


def fine(seed: int = 0) -> Tensor:
    """Entries of very different sizes, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(200, 150, generator=generator) * (2 * torch.randn(200, 1, generator=generator)).exp()


def int8(tensor: Tensor) -> Tensor:
    step = tensor.abs().max() / 127
    return (tensor / step).round() * step


def float8(tensor: Tensor) -> Tensor:
    scale = tensor.abs().max() / 448
    return (tensor / scale).to(torch.float8_e4m3fn).float() * scale


def largest(tensor: Tensor) -> Tensor:
    return torch.where(tensor.abs() > tensor.abs().quantile(0.8), tensor, torch.zeros_like(tensor))


def thinned(tensor: Tensor) -> Tensor:
    return tensor * (torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)) < 0.3)


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        (lambda tensor: tensor, Coarseness.FINE),
        (int8, Coarseness.EVEN),
        (float8, Coarseness.DIGITS),
        (lambda tensor: tensor.bfloat16().float(), Coarseness.DIGITS),
        (largest, Coarseness.LARGEST),
        (thinned, Coarseness.THINNED),
    ],
)
def test_the_kind_is_told_by_the_values(store, kind):
    assert storage_of(store(fine())).kind is kind


def test_rows_of_zeros_are_no_pruning():
    tensor = fine()
    tensor[50:] = 0
    assert storage_of(tensor).kind is Coarseness.FINE
    assert storage_of(torch.zeros(5, 5)).kind is Coarseness.FINE


def test_ordinary_floats_have_no_variance():
    assert storage_variance(fine()) is None


@pytest.mark.parametrize("store", [float8, lambda tensor: tensor.bfloat16().float()])
def test_the_variance_of_few_digits_is_that_of_the_error(store):
    tensor = fine()
    stored = store(tensor)
    variance = storage_variance(stored)
    assert variance is not None
    normal = variance > 0
    ratio = ((stored - tensor).double().square()[normal] / variance[normal]).mean()
    assert float(ratio) == pytest.approx(1, rel=0.25)


def test_the_variance_of_a_grid_is_a_twelfth_of_its_step_squared():
    tensor = torch.rand(200, 150, generator=torch.Generator().manual_seed(0)) - 0.5
    variance = storage_variance(int8(tensor))
    assert variance is not None
    assert float((int8(tensor) - tensor).square().mean()) == pytest.approx(float(variance.mean()), rel=0.05)


def test_pruned_entries_are_below_their_bound():
    tensor = fine()
    variance = storage_variance(largest(tensor))
    assert variance is not None
    assert float((largest(tensor) - tensor).square().mean()) <= float(variance.mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_variance_of_rounding(dtype):
    values = fine().double() * torch.rand(200, 150, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    error = (values.to(dtype).double() - values).square()
    usual = values.abs() > 1e-3  # float16 has even steps below 6e-5
    assert float((error / rounding_variance(values, dtype))[usual].mean()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("shape", [(2, 3), (4, 16)])
@pytest.mark.parametrize(
    ("store", "expected"),
    [
        (lambda v: v, 2.2e-16),
        (lambda v: v.float(), 1.2e-7),
        (lambda v: v.float().double(), 1.2e-7),
        (lambda v: v.bfloat16().double(), 7.8e-3),
        (lambda v: v.half().float(), 9.8e-4),
        (lambda v: v.round(decimals=2), 1e-2),
        (lambda v: v.round(decimals=3).float(), 1e-3),
        (lambda v: (v * 127 / v.abs().max()).round() * v.abs().max() / 127, 1 / 127),
    ],
)
def test_rounding_shows_whatever_the_type(shape, store, expected):
    for seed in range(10):
        values = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
        values.view(-1)[0] = 0.999  # so that steps relative to the largest entry are the steps
        seen = relative_rounding(store(values))
        assert expected * 0.7 <= seen <= expected * 3, (seed, seen)


def float16(tensor: Tensor) -> Tensor:
    return tensor.half().float()


def bfloat16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


@pytest.mark.parametrize("store", [int8, float8, bfloat16, float16, largest, thinned, lambda tensor: tensor])
def test_what_was_stored_lies_in_its_cells_and_a_hundredth_more_does_not(store):
    tensor = fine()
    seen = store(tensor)
    assert float(distance_to_cells(seen, tensor).norm() / seen.norm()) < 1e-6  # float32 rounds the levels themselves
    assert float(distance_to_cells(seen, 1.01 * tensor).norm() / seen.norm()) > 1e-3


def test_float8_is_told_where_a_few_entries_are_far_larger_than_the_others():
    """Then nearly all are whole multiples of its smallest step, as those of int8 are of theirs."""
    tensor = fine()
    tensor[0, :40] *= torch.linspace(1000, 20_000, 40)
    for store, kind in ((float8, Coarseness.DIGITS), (int8, Coarseness.EVEN)):
        seen = store(tensor)
        assert storage_of(seen).kind is kind
        assert float(distance_to_cells(seen, tensor).norm() / seen.norm()) < 1e-6


def test_float16_is_told_by_its_digits_though_small_entries_become_zero():
    seen = float16(1e-5 * fine())
    assert float((seen == 0).double().mean()) > 0.01
    assert storage_of(seen).kind is Coarseness.DIGITS
    assert storage_of(seen).dtype is torch.float16
