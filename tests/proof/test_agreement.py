"""Agreement of two updates: sums of squares of any size, the factor between them, and which tensor is the worst."""

from __future__ import annotations

import math

import pytest
import torch

from unmask.evidence.gradients import GradientEvidence
from unmask.proof.agreement import (
    Products,
    agree,
    agreement_of,
    exact_products,
    merge_rows,
    products_at_one,
)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-6, 1.0, 1e12, 1e25])
@pytest.mark.parametrize("size", [3, 4096, 10_000])
def test_quick_products_are_the_exact_ones(scale, size):
    """Squares below float32's smallest number and above its largest count, too."""
    seen = scale * torch.randn(size, generator=torch.Generator().manual_seed(0))
    again = seen * (1 + 1e-4 * torch.randn(size, generator=torch.Generator().manual_seed(1)))
    quick, exact = products_at_one(seen, again, size), exact_products(seen, again, size)
    assert quick.seen == pytest.approx(exact.seen, rel=1e-6)
    assert quick.distance(1.0) == pytest.approx(float((seen.double() - again.double()).norm()), rel=1e-3)


def test_a_factor_is_found_and_the_worst_tensor_named():
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(50, 20, generator=generator) for name in ("first", "second")}
    evidence = GradientEvidence({name: 3 * tensor for name, tensor in tensors.items()}, "fingerprint")
    found = agree(evidence, tensors)
    assert found.scale == pytest.approx(3.0)
    assert found.holds_up_to_scale
    assert not found.holds
    wrong = {**tensors, "second": tensors["second"] + 0.1}
    assert agree(GradientEvidence(tensors, "fingerprint"), wrong).worst == "second"


def test_nothing_to_compare_is_no_agreement():
    nothing = agreement_of({}, tolerance=1.0)
    assert not nothing.holds
    assert not nothing.holds_up_to_scale


def test_rows_of_equal_tokens_are_added_up():
    rows = torch.arange(8.0).view(4, 2)
    merged = merge_rows(rows, [(0, 2)])
    assert merged.tolist() == [[4.0, 6.0], [2.0, 3.0], [0.0, 0.0], [6.0, 7.0]]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("sums", [(math.inf, 1.0, 1.0), (math.inf, math.nan, math.inf), (1.0, math.inf, math.inf)])
def test_sums_that_overflow_are_no_agreement(place, sums):
    """Wherever the tensor stands among those that agree."""
    products = {name: Products(4.0, 4.0, 4.0, 4) for name in ("a", "b", "c")}
    products["abc"[place]] = Products(*sums, 4)
    found = agreement_of(products, tolerance=1.0)
    assert not found.holds
    assert not found.holds_up_to_scale
