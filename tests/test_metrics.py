"""The table of metrics: ranges that hold what an attack that finds nothing has, and words for each."""

from __future__ import annotations

from unmask.channels import CHANNELS
from unmask.metrics import AMOUNTS, LEAKS, METRICS


def test_every_metric_says_what_it_is_and_nothing_lies_in_its_range():
    for name, metric in METRICS.items():
        assert metric.title, name
        assert any(metric.is_of(channel) for channel in CHANNELS), name
        assert metric.least <= metric.of_nothing <= metric.largest, name


def test_each_channel_has_one_metric_that_says_how_much_leaked():
    for channel in CHANNELS:
        assert sum(METRICS[name].is_of(channel) for name in LEAKS) == 1
        assert any(METRICS[name].is_of(channel) for name in AMOUNTS)


def test_errors_are_no_shares():
    assert METRICS["token_recall"].is_share
    assert not METRICS["weight_error"].is_share
    assert not METRICS["hidden_size_found"].is_share
