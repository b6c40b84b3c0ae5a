"""Sums of rows: found by least squares, exact where numbers are plain, and refused where something is missing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unmask.models.wiring import RowFlow, Sum, find_sum, plain_number


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 7, 16)), generator=torch.Generator().manual_seed(seed))


KNOWN = {"a": rows(0), "b": rows(1), "c": rows(2)}


@pytest.mark.parametrize("factors", [{"a": 1.0}, {"a": 1.0, "c": 1.0}, {"b": 0.22, "c": 1.0}, {"a": math.sqrt(2048)}])
def test_plain_factors_are_found_to_the_last_digit(factors):
    assert find_sum(Sum(factors)(KNOWN), KNOWN) == Sum(factors)


def test_rows_of_another_shape_are_the_same_rows():
    assert find_sum((KNOWN["a"] + KNOWN["b"]).flatten(0, 1), KNOWN) == Sum({"a": 1.0, "b": 1.0})


def test_what_is_no_sum_is_none():
    assert find_sum(rows(9), KNOWN) is None
    assert find_sum(KNOWN["a"] * KNOWN["b"], KNOWN) is None
    assert find_sum(rows(9, 2, 7, 5), KNOWN) is None


def test_half_precision_rounds_sums():
    known = {name: part.bfloat16() for name, part in KNOWN.items()}
    assert find_sum(known["a"] + known["b"], known) == Sum({"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("meant", [1.0, 1 / 3, 0.22, math.sqrt(576), 1 / math.sqrt(24), 50.0, -2.0])
def test_numbers_that_were_meant(meant):
    assert plain_number(meant * (1 + 1e-8)) == pytest.approx(meant, rel=1e-15)


def test_a_number_that_is_not_plain_stays():
    assert plain_number(0.12340987) == 0.12340987


def test_rows_follow_from_others_through_modules():
    modules = {"norm": nn.LayerNorm(16), "more": nn.Linear(16, 16)}
    flow = RowFlow({"norm": Sum({"a": 1.0, "b": 1.0}), "more": Sum({"norm": 1.0})})
    wanted = Sum({"a": 1.0, "more": 2.0})
    expected = KNOWN["a"] + 2 * modules["more"](modules["norm"](KNOWN["a"] + KNOWN["b"]))
    torch.testing.assert_close(flow.evaluate(wanted, KNOWN, modules.__getitem__), expected)
    assert flow.needed(wanted, KNOWN) == ["norm", "more"]
    assert flow.leads_to(wanted, ("a", "b"))
    assert not flow.leads_to(wanted, ("a",))
    assert not flow.leads_to(None, KNOWN)
