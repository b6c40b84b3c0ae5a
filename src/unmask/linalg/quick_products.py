"""Products of float32 matrices in fewer digits, where they only screen what is computed again.

On GPUs with TF32 a product is about eight times as fast, and right to three digits. CPUs are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def multiply_quickly() -> Iterator[None]:
    """TF32 inside, what was set before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def screens_in_few_digits(rows: Tensor) -> bool:
    """Whether products of such rows have fewer digits inside."""
    return rows.device.type == "cuda" and rows.dtype is torch.float32
