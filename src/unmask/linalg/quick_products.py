"""Products of float32 matrices in fewer digits, where they only screen what is computed again.

On GPUs with TF32 a product is about eight times as fast, and right to three digits. CPUs that multiply bfloat16 in
tiles (AMX) are quicker with large matrices, and right to between two and three digits; for small ones they
take longer, so a caller says whether its matrices are large. Other CPUs are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


@contextmanager
def multiply_quickly(large: bool = False) -> Iterator[None]:
    """Fewer digits inside, what was set before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if large and _has_tiles() else "high")  # for GPUs these are the same
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def screens_in_few_digits(rows: Tensor, large: bool = False) -> bool:
    """Whether products of such rows have fewer digits inside."""
    is_quick = rows.device.type == "cuda" or (large and rows.device.type == "cpu" and _has_tiles())
    return is_quick and rows.dtype is torch.float32


@cache
def _has_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles; older versions of torch do not tell, and then it does not."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16")) and torch.backends.mkldnn.is_available()
