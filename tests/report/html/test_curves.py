from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.report.findings import failed, inconclusive, query_finding, realistic, text_case, text_finding

from unmask.report.html.curves import MAX_LINES, charts_of


def noisy(sigma: str, recall: float, seed: int = 0, **changes):
    return text_finding(text_case(defences=[f"noise:sigma={sigma}"], seed=seed, **changes), recall)


def chart(findings, axis: str, metric: str = "token_recall"):
    return next(one for one in charts_of(findings) if one.axis.name == axis and one.metric == metric)


def test_a_point_is_the_mean_over_seeds_with_chance():
    found = [noisy("0.001", 0.2), noisy("0.001", 0.4, seed=1), noisy("0.01", 0.1), noisy("0.01", 0.1, seed=1)]
    (line,) = chart(found, "noise").lines
    first, second = line.points
    assert (first.x, first.num_runs, first.chance) == (0.001, 2, pytest.approx(0.06))
    assert first.mean == pytest.approx(0.3)
    assert (first.low, first.high) == (0.0, 1.0)  # two seeds tell little: t is 12.7
    assert (second.low, second.high) == (pytest.approx(0.1), pytest.approx(0.1))


def test_one_x_makes_no_curve():
    assert charts_of([noisy("0.001", 0.2), noisy("0.001", 0.4, seed=1)]) == []


def test_without_the_defence_is_the_point_at_none():
    found = [text_finding(text_case(), 1.0, 4), noisy("0.001", 0.4), text_finding(text_case(batch_size=16), 1.0, 16)]
    (line,) = chart(found, "noise").lines
    assert [point.x for point in line.points] == [0.0, 0.001]
    assert line.points[0].mean == 1.0


def test_other_defences_stay_along_a_line():
    both = text_finding(text_case(defences=["clip:norm=1", "noise:sigma=0.1"]), 0.3)
    clipped = text_finding(text_case(defences=["clip:norm=1"]), 0.9)
    (line,) = chart([both, clipped, text_finding(text_case(), 1.0)], "noise").lines
    assert [(point.x, point.mean) for point in line.points] == [(0.0, 0.9), (0.1, 0.3)]


def test_relative_noise_has_an_axis_of_its_own():
    found = [noisy("0.1,relative=true", 0.4), noisy("0.2,relative=true", 0.3), noisy("0.1", 0.4)]
    assert {one.axis.name for one in charts_of(found)} == {"relative noise"}


def test_gaussian_and_laplace_noise_are_two_lines():
    found = [noisy("0.1", 0.4), noisy("0.2", 0.3)]
    found += [text_finding(text_case(defences=[f"laplace:sigma={sigma}"]), 0.2) for sigma in ("0.1", "0.2")]
    assert [line.name for line in chart(found, "noise").lines] == [
        "smollm2-135m · noise:sigma=…",
        "smollm2-135m · laplace:sigma=…",
    ]


def private(multiplier: float, recall: float, epsilon: float | None):
    case = text_case(protocol=f"dpsgd:noise_multiplier={multiplier:g},max_grad_norm=1")
    one = text_finding(case, recall)
    return replace(one, metrics={**one.metrics, "epsilon": epsilon})


def test_private_training_is_drawn_against_its_noise_and_against_epsilon():
    found = [private(0.1, 0.4, 80.0), private(1.0, 0.1, 0.9), text_finding(text_case(), 1.0, 4)]
    (line,) = chart(found, "DP-SGD's noise").lines
    assert [point.x for point in line.points] == [0.1, 1.0]  # plain FedSGD does not clip
    (line,) = chart(found, "ε").lines
    assert [(point.x, point.mean) for point in line.points] == [(0.9, 0.1), (80.0, 0.4), (math.inf, 1.0)]


def test_different_things_never_share_a_point():
    found = [private(0.0, 0.2, None), private(0.1, 0.1, 80.0), text_finding(text_case(), 1.0, 4)]
    (line,) = chart(found, "DP-SGD's noise").lines
    assert [(point.x, point.mean, point.num_runs) for point in line.points] == [(0.0, 0.2, 1), (0.1, 0.1, 1)]
    found = [noisy("0", 0.9), noisy("0.1", 0.3), text_finding(text_case(), 1.0, 4)]
    (line,) = chart(found, "noise").lines
    assert [(point.x, point.mean, point.num_runs) for point in line.points] == [(0.0, 0.9, 1), (0.1, 0.3, 1)]


def test_an_epsilon_that_was_infinite_is_not_placed():
    assert all(one.axis.name != "ε" for one in charts_of([private(0.1, 0.4, None), private(0.0, 0.9, None)]))


def test_leak_against_batch_size_and_lines_named_by_what_differs():
    found = [text_finding(text_case(batch_size=size, model=name), 1.0, size) for size in (1, 4) for name in ("a", "b")]
    one = chart(found, "batch size", "exact_rate")
    assert [line.name for line in one.lines] == ["a", "b"]
    assert [[point.x for point in line.points] for line in one.lines] == [[1, 4], [1, 4]]


def test_weights_against_noise():
    found = [query_finding(rate, defences=[f"noise:sigma={sigma}"]) for sigma, rate in (("0.1", 1.0), ("1", 0.0))]
    assert chart(found, "noise", "weights_rate").channel == "queries"


def test_runs_that_could_not_tell_are_counted():
    found = [noisy("0.001", 0.4), inconclusive(text_case(defences=["noise:sigma=0.01"]))]
    (line,) = chart(found, "noise").lines
    assert [(point.num_unclear, point.is_open) for point in line.points] == [(0, False), (1, True)]


def test_errors_and_cases_that_were_not_run_are_counted_at_their_place():
    found = [text_finding(text_case(batch_size=size), 0.5, 0) for size in (4, 8)]
    found += [failed(text_case(batch_size=4, seed=1)), failed(text_case(batch_size=64)), failed(text_case(model="b"))]
    (line,) = charts_of(found, [text_case(batch_size=8, seed=1), text_case(batch_size=8, seed=2)])[0].lines
    assert [(point.x, point.num_runs, point.num_lost) for point in line.points] == [(4, 1, 1), (8, 1, 2)]
    assert all(point.is_open for point in line.points)
    assert line.empty == ((64, 1),)


def test_an_error_stands_beside_its_own_case_on_an_axis_that_is_measured():
    found = [private(0.1, 0.4, 80.0), private(1.0, 0.1, 0.9)]
    (line,) = chart([*found, failed({**found[0].case, "seed": 1})], "ε").lines
    assert [(point.x, point.num_lost) for point in line.points] == [(0.9, 0), (80.0, 1)]


def test_controls_under_no_gate_are_left_out_beside_cases_under_one():
    found = [noisy("0.001", 0.4), noisy("0.01", 0.1), noisy("1000", 0.0)]
    (line,) = charts_of(found, gated=[one.id for one in found[:2]])[0].lines
    assert [point.x for point in line.points] == [0.001, 0.01]
    assert line.num_ungated == 1
    plain = text_finding(text_case(), 1.0, 4)
    (line,) = charts_of([*found[1:], plain], gated=[found[1].id])[0].lines  # what is compared with stays
    assert [point.x for point in line.points] == [0.0, 0.01]
    (line,) = charts_of(found, gated=[found[0].id])[0].lines  # a single place is no curve
    assert ([point.x for point in line.points], line.num_ungated) == ([0.001, 0.01, 1000], 0)


def test_many_lines_are_split_over_charts():
    found = [
        text_finding(text_case(batch_size=size, model=f"m{n}"), 1.0) for size in (1, 4) for n in range(MAX_LINES + 1)
    ]
    parts = [one for one in charts_of(found) if one.metric == "token_recall"]
    assert [len(one.lines) for one in parts] == [MAX_LINES, 1]
    assert [one.title[-8:] for one in parts] == ["(1 of 2)", "(2 of 2)"]


def test_odd_settings_are_left_alone():
    odd = [noisy("lots", 0.1), noisy("nan", 0.1), text_finding(text_case(protocol="dpsgd:noise_multiplier=x"), 0.1)]
    assert charts_of(odd) == []


def test_a_realistic_audit_has_all_axes():
    axes = {one.axis.name for one in charts_of(realistic())}
    assert axes == {"batch size", "noise", "DP-SGD's noise", "ε"}
