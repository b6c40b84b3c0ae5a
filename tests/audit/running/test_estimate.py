"""Estimates before a run: larger where more is to do, never without a model that is known, and on the dry run."""

from __future__ import annotations

from unmask.audit.cases.case import Case
from unmask.audit.running.estimate import estimate
from unmask.models.outline import Outline

DECODER = Outline(causal=True, num_blocks=30, has_language_head=True, num_parameters=134_500_000)


def case(**spec: object) -> Case:
    usual = {"channel": "gradients", "model": "m", "batch_size": 8, "defences": [], "protocol": "fedsgd"}
    return Case({**usual, **spec})


def minutes(model: Outline = DECODER, **spec: object) -> float:
    guess = estimate(case(**spec), model)
    assert guess is not None
    return guess.minutes


def test_more_work_is_estimated_longer():
    plain = minutes()
    assert minutes(batch_size=16) > plain
    assert minutes(effort=3) > 2 * plain
    assert minutes(defences=["noise:sigma=1e-4"]) > 2 * plain  # its control runs too
    double = Outline(causal=True, num_blocks=30, has_language_head=True, num_parameters=269_000_000)
    assert minutes(double) == 2 * plain
    assert estimate(case(), double).gigabytes > estimate(case(), DECODER).gigabytes > 2.0


def test_a_limit_on_time_bounds_the_estimate():
    assert estimate(Case(case(batch_size=10**6).spec, time_limit=60.0), DECODER).minutes == 1.0


def test_a_model_that_is_not_known_has_no_estimate():
    assert estimate(case(), None) is None
    assert estimate(case(), "the weights are not installed") is None


def test_every_channel_has_an_estimate():
    for channel in ("outputs", "caches", "vectors", "queries", "inputs"):
        guess = estimate(case(channel=channel, model="", protocol="fedsgd"), None)
        assert "GB" in str(guess)
