"""Attention to first order: one solution for every regular W, and the limit of softmax attention."""

from __future__ import annotations

import pytest
import torch
from tests.attacks.outputs.attention_layers import gaussian

from unmask.linalg.first_order_attention import first_order_outputs, invert_first_order
from unmask.linalg.softmax_attention import AttentionMap


@pytest.mark.parametrize(("n", "r"), [(2, 2), (4, 4), (8, 8), (12, 5), (30, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_theorem_the_one_solution_is_the_input_of_indefinite_layers_too(n, r, seed):
    W, X = gaussian(seed, r, r) / r, gaussian(seed + 10, n, r)
    found = invert_first_order(W, first_order_outputs(W, X), num_steps=100)
    assert torch.allclose(found, X, atol=1e-5 * float(X.abs().max()))  # conditions of C and W up to 1e6


def test_softmax_attention_with_small_scores_is_its_first_order():
    W, X = gaussian(0, 6, 6) / 6, gaussian(1, 9, 6)
    errors = [float((AttentionMap(s * W)(X) - first_order_outputs(s * W, X)).norm()) for s in (1e-2, 1e-3)]
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)  # the next order is the second


def test_many_normal_tokens_are_linear_at_any_sharpness():
    """Tilting a normal distribution moves its mean by C Wᵀx; what is left is the sample's noise."""
    W, X = gaussian(0, 2, 2) / 2, gaussian(1, 4000, 2)
    Y = AttentionMap(W)(X)
    assert float((Y - first_order_outputs(W, X)).norm() / Y.norm()) < 0.1


def test_a_batch_is_its_parts_and_what_has_no_solution_is_not_finite():
    W, Y = gaussian(0, 4, 4), gaussian(1, 3, 6, 4)
    Y[1] = Y[1, :1]  # equal rows: no deviations
    found = invert_first_order(W, Y)
    assert torch.allclose(found[0], invert_first_order(W, Y[0]), atol=1e-6)
    assert not found[1].isfinite().all()
    assert found[2].isfinite().all()
