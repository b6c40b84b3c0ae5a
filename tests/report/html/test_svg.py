from __future__ import annotations

import itertools
import math
from dataclasses import replace
from xml.etree import ElementTree

from tests.report.findings import HOSTILE, failed, inconclusive, realistic, text_case, text_finding

from unmask.report.html.curves import charts_of
from unmask.report.html.svg import HEIGHT, WIDTH, Scale, chance_legend, draw


def test_axes_are_logarithmic_where_values_span_a_decade():
    assert Scale([1, 10]).is_log
    assert not Scale([1, 9]).is_log
    scale = Scale([1, 10, 100])
    assert scale(10) - scale(1) == scale(100) - scale(10)


def test_none_and_infinity_have_places_of_their_own():
    scale = Scale([0.0, 1e-6, 1e-3, math.inf])
    places = [scale(x) for x in (0.0, 1e-6, 1e-3, math.inf)]
    assert places == sorted(places)
    assert [label for _, label in scale.ticks()] == ["none", "10⁻⁶", "0.001", "∞"]
    assert 0 < places[0] < places[-1] < WIDTH


def test_a_single_x_beside_none_can_be_drawn():
    scale = Scale([0.0, 0.5])
    assert scale(0.0) < scale(0.5) < WIDTH


def test_labels_do_not_touch():
    places = [x for x, _ in Scale([float(x) for x in range(1, 9)] + [8.01]).ticks()]
    assert all(after - before >= 40 for before, after in itertools.pairwise(places))


def test_every_chart_is_well_formed_named_and_inside_its_box():
    for number, chart in enumerate(charts_of(realistic())):
        root = ElementTree.fromstring(str(draw(chart, number)))
        assert root.find("title").text == chart.title
        assert chart.lines[0].name in root.find("desc").text
        assert root.get("aria-labelledby") == f"c{number}t c{number}d"
        for mark in root.iter("circle"):
            assert 0 <= float(mark.get("cx")) <= WIDTH
            assert 0 <= float(mark.get("cy")) <= HEIGHT
        assert not [node for node in root.iter() if node.get("style") or node.get("onload")]


def test_chance_is_dashed_and_what_could_not_tell_is_hollow():
    found = [text_finding(text_case(), 1.0), inconclusive(text_case(defences=["noise:sigma=0.1"]))]
    root = ElementTree.fromstring(str(draw(charts_of(found)[0], 0)))
    kinds = [node.get("class", "") for node in root.iter()]
    assert kinds.count("chance") == 1
    assert sum("hollow" in kind for kind in kinds) == 1
    assert "line c0 dotted" in kinds


def test_every_chance_has_the_colour_of_its_line_unless_all_share_one():
    found = [text_finding(text_case(batch_size=size, model=name), 0.5) for size in (1, 4) for name in ("a", "b")]
    (shared, *_) = charts_of(found)
    assert str(draw(shared, 0)).count('class="chance"') == 1
    assert [name for _, name in chance_legend(shared.lines)] == ["chance"]
    found = [replace(one, chance={"token_recall": 0.1 if one.case["model"] == "a" else 0.3}) for one in found]
    (own, *_) = charts_of(found)
    assert [str(draw(own, 0)).count(f'class="chance own c{index}"') for index in (0, 1)] == [1, 1]
    assert [name for _, name in chance_legend(own.lines)] == ["chance of a", "chance of b"]


def test_an_error_makes_a_point_hollow():
    found = [text_finding(text_case(batch_size=size), 0.5) for size in (1, 4)] + [failed(text_case(seed=1))]
    assert str(draw(charts_of(found)[0], 0)).count("hollow") == 1


def test_an_interval_is_drawn_only_with_several_seeds():
    def bars(seeds):
        found = [text_finding(text_case(batch_size=n, seed=seed), 0.5) for n in (1, 4) for seed in range(seeds)]
        return str(draw(charts_of(found)[0], 0)).count('class="bar')

    assert bars(1) == 0
    assert bars(2) == 2


def test_hostile_names_stay_text():
    for text in HOSTILE:
        found = [text_finding(text_case(model=text, batch_size=size), 0.5) for size in (1, 4)]
        drawn = str(draw(charts_of(found)[0], 0))
        ElementTree.fromstring(drawn)
        assert "<script" not in drawn
        assert "<img" not in drawn
