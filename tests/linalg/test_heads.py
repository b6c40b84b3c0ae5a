import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.queries.layers import joined, one, vector_layer
from tests.attacks.queries.random_heads import random_head
from tests.attacks.queries.random_networks import normal

from unmask.errors import InputError
from unmask.linalg.heads import HeadWeights, canonical_heads


def slow(heads: HeadWeights, X: torch.Tensor) -> float:
    """Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·v_hᵀ x_i of one sequence, number by number."""
    answer = 0.0
    for W, v in zip(heads.W, heads.v, strict=True):
        powers = [math.exp(float(x @ W @ X[-1])) for x in X]
        answer += sum(power / sum(powers) * float(v @ x) for power, x in zip(powers, X, strict=True))
    return answer


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("num_heads", [0, 1, 3])
def test_the_function_is_the_formula(length, num_heads):
    heads, X = random_head(4, num_heads=num_heads), normal(1)(6, length, 4)
    expected = torch.tensor([slow(heads, x) for x in X], dtype=torch.float64)
    assert torch.allclose(heads(X), expected, rtol=1e-13, atol=1e-14)


def test_one_token_is_answered_with_the_sum_of_v():
    heads, X = random_head(4, num_heads=3), normal(1)(6, 1, 4)
    assert torch.allclose(heads(X), X[:, 0] @ heads.v.sum(0), rtol=0, atol=1e-14)


def test_vectors_are_answered_entry_by_entry():
    heads, X = vector_layer(3, 4, 2), normal(1)(6, 5, 4)
    entries = [HeadWeights(W=heads.W, v=heads.v[:, :, p])(X) for p in range(2)]
    assert torch.allclose(heads(X), torch.stack(entries, dim=1), rtol=0, atol=1e-14)


def test_long_tokens_do_not_overflow():
    assert random_head(4)(1e150 * normal(1)(3, 2, 4)).isfinite().all()


def test_it_answers_in_the_precision_of_its_weights():
    heads = random_head(4, num_heads=2)
    single = HeadWeights(W=heads.W.float(), v=heads.v.float())
    X = normal(1)(6, 3, 4)
    assert single(X.float()).dtype == torch.float32
    assert 0 < float((single(X.float()) - heads(X)).abs().max()) < 1e-5


# The canonical form


@settings(max_examples=30)
@given(st.integers(0, 999), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=4))
def test_the_canonical_form_has_the_same_function_and_is_its_own(seed, num_heads, copied):
    """Heads that are split, and heads that do nothing, in any order."""
    heads, draw = random_head(4, seed, num_heads=num_heads), normal(seed)
    more = [one(heads.W[place % num_heads], draw(4)) for place in copied]
    layer = joined(heads, *more, one(draw(4, 4), 0 * draw(4)))
    order = torch.randperm(len(layer), generator=torch.Generator().manual_seed(seed))
    short = canonical_heads(layer.select(order))
    assert len(short) == num_heads
    X = 2 * normal(seed)(20, 3, 4)
    assert torch.allclose(short(X), layer(X), rtol=0, atol=1e-11)
    again = canonical_heads(short)
    assert torch.equal(again.W, short.W)
    assert torch.equal(again.v, short.v)


def test_heads_whose_v_cancel_are_nothing():
    heads = random_head(4, num_heads=2)
    layer = joined(heads, one(heads.W[0], -heads.v[0]))
    assert torch.equal(canonical_heads(layer).W, heads.W[1:])


@pytest.mark.parametrize(("apart", "num_heads"), [(1e-8, 1), (1e-4, 2)])
def test_close_heads_are_one_within_the_tolerance(apart, num_heads):
    heads = random_head(4)
    assert len(canonical_heads(joined(heads, one(heads.W[0] * (1 + apart), heads.v[0])))) == num_heads


def test_multiples_and_opposites_stay_apart():
    W, v = random_head(4).W[0], random_head(4).v[0]
    assert len(canonical_heads(joined(one(W, v), one(2 * W, v), one(-W, v), one(0 * W, v)))) == 4


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scales_do_not_matter(scale):
    heads = random_head(4, num_heads=3)
    assert len(canonical_heads(HeadWeights(W=scale * heads.W, v=heads.v))) == 3
    assert len(canonical_heads(HeadWeights(W=heads.W, v=scale * heads.v))) == 3


def test_vectors_and_no_heads_have_a_canonical_form_too():
    heads = vector_layer(2, 4, 3)
    merged = canonical_heads(HeadWeights(W=heads.W[[0, 0]], v=heads.v))
    assert torch.allclose(merged.v[0], heads.v.sum(0))
    assert len(canonical_heads(heads.select(torch.tensor([False, False])))) == 0


@pytest.mark.parametrize(("W", "v"), [((2, 4, 4), (3, 4)), ((2, 4, 3), (2, 4)), ((2, 4, 4), (2, 5)), ((4, 4), (4,))])
def test_shapes_that_do_not_fit_are_refused(W, v):
    with pytest.raises(InputError, match="W must be"):
        HeadWeights(W=torch.zeros(W), v=torch.zeros(v))
