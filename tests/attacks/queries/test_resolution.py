import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.attacks.queries.resolution import Resolution

precisions = st.floats(-16, -3).map(lambda exponent: 10.0**exponent)


def sigmoid(t: float) -> float:
    return 1 / (1 + math.exp(-t))


@given(precisions)
def test_heads_that_are_off_do_not_show_and_scores_that_are_read_do(precision):
    resolution = Resolution(precision)
    assert sigmoid(-resolution.saturation) < precision
    # Heads are moved towards their borders while columns are read: half of the way must still be off.
    assert sigmoid(-0.65 * resolution.saturation) < 1.1 * precision
    assert sigmoid(resolution.lowest_score) > 10 * precision
    assert resolution.lowest_score < -2


@given(precisions, st.floats(1, 100))
def test_thresholds_follow_the_precision(precision, factor):
    fine, coarse = Resolution(precision), Resolution(precision * factor)
    for name in ("angle", "sinusoid", "step", "prediction", "rank", "spare_columns"):
        assert getattr(fine, name) <= getattr(coarse, name)
    assert fine.saturation >= coarse.saturation


@given(precisions)
def test_nothing_is_asked_for_that_precision_does_not_give(precision):
    resolution = Resolution(precision)
    assert min(resolution.prediction, resolution.rank, resolution.sinusoid, resolution.step) >= precision
    assert resolution.angle >= resolution.least_angle


@pytest.mark.parametrize(("precision", "spare"), [(1e-16, 1), (6e-8, 3)])
def test_coarse_ranks_take_more_columns_to_be_believed(precision, spare):
    assert Resolution(precision).spare_columns == spare
