"""Input scores: by hand, up to the order of rows, against brute force, and on what is not finite."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.errors import InputError
from unmask.scores import score_inputs

quick = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def random_rows(seed: int, num_rows: int = 5, width: int = 3) -> torch.Tensor:
    return torch.randn(num_rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_errors_by_hand():
    true = torch.tensor([[3.0, 4.0], [0.0, 12.0]])
    score = score_inputs(torch.tensor([[3.0, 4.0], [5.0, 12.0]]), true)
    assert score.relative_error == pytest.approx(5 / 13)
    assert score.worst_row_error == pytest.approx(5 / 12)
    assert score.assignment == (0, 1)


@quick
@given(seeds, st.permutations(range(5)))
def test_any_order_undoes_a_permutation(seed, order):
    true = random_rows(seed)
    score = score_inputs(true[order], true, row_order="any")
    assert score.relative_error == score.worst_row_error == 0
    assert [order[index] for index in score.assignment] == list(range(5))


@quick
@given(seeds, seeds)
def test_any_order_equals_brute_force(seed, other_seed):
    true, recovered = random_rows(seed, num_rows=4), random_rows(other_seed, num_rows=4)
    best = min(score_inputs(recovered[list(p)], true).relative_error for p in permutations(range(4)))
    # The same minimum, over sums that are rounded in another order.
    assert score_inputs(recovered, true, row_order="any").relative_error == pytest.approx(best, rel=1e-12)


@quick
@given(seeds, st.floats(1e-14, 1e-4))
def test_error_is_the_relative_size_of_the_perturbation(seed, size):
    true = random_rows(seed)
    noise = random_rows(seed + 1)
    recovered = true + size * noise * true.norm() / noise.norm()
    # Adding the noise to values of order 1 rounds it by 1e-16, and there are few entries.
    for row_order in ("fixed", "any"):
        error = score_inputs(recovered, true, row_order).relative_error
        assert error == pytest.approx(size, rel=1e-9, abs=2e-15)


def test_small_differences_of_large_rows_decide_the_order():
    # Expanding the square in the distance would lose these differences to rounding.
    true = 1e6 + 1e-4 * random_rows(0)
    order = [3, 1, 4, 0, 2]
    assert score_inputs(true[order], true, row_order="any").relative_error == 0


def test_wrong_order_is_an_error_when_order_is_fixed():
    true = random_rows(0)
    assert score_inputs(true.flip(0), true).relative_error > 0.5
    assert score_inputs(true.flip(0), true, row_order="any").relative_error == 0


def test_unrelated_rows_score_badly():
    true, recovered = random_rows(0, 20, 10), random_rows(1, 20, 10)
    assert score_inputs(recovered, true, row_order="any").relative_error > 0.5
    assert score_inputs(torch.zeros_like(true), true).relative_error == 1


def test_zero_row_is_recovered_only_as_zero():
    true = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert score_inputs(true.clone(), true).worst_row_error == 0
    almost = score_inputs(true + torch.tensor([[0.0, 0.0], [0.0, 1e-3]]), true)
    assert almost.worst_row_error == math.inf
    assert almost.relative_error == pytest.approx(1e-3)


def test_low_precision_is_compared_in_float64():
    true = random_rows(0)
    error = score_inputs(true.to(torch.float32), true).relative_error
    # float32 rounds each entry by at most 2^-24 of it.
    assert 0 < error <= 2**-24


@pytest.mark.parametrize("row_order", ["fixed", "any"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_recovery_that_is_not_finite_has_infinite_error(row_order, value):
    true = random_rows(0)
    recovered = true.clone()
    recovered[1, 1] = value
    score = score_inputs(recovered, true, row_order)
    assert score.relative_error == score.worst_row_error == math.inf


def test_callers_mistakes():
    true = random_rows(0)
    with pytest.raises(InputError, match="shape of true"):
        score_inputs(true[:3], true)
    with pytest.raises(InputError, match="at least one entry"):
        score_inputs(true[:0], true[:0])
    with pytest.raises(InputError, match="not finite"):
        score_inputs(true, true / 0)
    with pytest.raises(InputError, match="row_order"):
        score_inputs(true, true, row_order="sorted")
