"""The Lipschitz constant of attention's Jacobian; `tests/benchmarks/test_paper_bounds.py` has ascents towards it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.linalg.attention_bounds import jacobian_lipschitz
from unmask.linalg.softmax_attention import AttentionMap


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.3, 1.0, 3.0]), st.booleans())
def test_no_quotient_of_jacobians_exceeds_it(seed, W_norm, causal):
    W, X, Z = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    attention = AttentionMap(W * W_norm / torch.linalg.matrix_norm(W, 2), causal)
    jacobians = [torch.func.jacrev(attention)(each).reshape(16, 16) for each in (X, Z)]
    radius = float(torch.cat([X, Z]).norm(dim=1).max())
    change = float(torch.linalg.matrix_norm(jacobians[0] - jacobians[1], 2) / (X - Z).norm())
    assert change <= jacobian_lipschitz(W_norm, radius, 4) * (1 + 1e-12)


@pytest.mark.parametrize("size", [(-1.0, 1.0, 2), (1.0, -1.0, 2), (1.0, 1.0, 0)])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(InputError, match="at least"):
        jacobian_lipschitz(*size)
