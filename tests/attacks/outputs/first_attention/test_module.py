"""What is said of a position: when an error is rounding, and when a token is clear."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.first_attention.module import FAR, Choice, rounding_error, zero_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_is_below_what_rounding_explains_and_that_is_far_from_wrong(dtype):
    assert 0 < zero_error(dtype) <= 1e-3
    assert rounding_error(dtype) < FAR
    assert rounding_error(dtype) >= torch.finfo(dtype).eps


def test_finer_types_explain_less():
    errors = [rounding_error(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert errors == sorted(errors)


@pytest.mark.parametrize(
    ("error", "rejected", "decades", "is_clear"),
    [
        (1e-7, 0.3, 1.0, True),
        (1e-7, 1e-6, 1.0, False),  # another token comes near
        (0.01, 0.9, 1.0, False),  # no rounding explains it
        (0.0, 0.0, 1.0, False),  # two tokens with the same row
        (1e-7, 0.3, 9.0, False),  # clear, but not as clear as was asked for
    ],
)
def test_a_token_is_clear_if_it_alone_explains_the_row(error, rejected, decades, is_clear):
    assert Choice(5, error, rejected, 100).is_clear(decades, torch.float32) is is_clear


def test_what_is_clear_depends_on_the_precision_of_the_evidence():
    choice = Choice(5, 2e-3, 0.9, 100)
    assert choice.is_clear(1.0, torch.bfloat16)
    assert not choice.is_clear(1.0, torch.float32)
