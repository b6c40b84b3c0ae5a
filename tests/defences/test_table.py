"""The table: every line complete, every example true, values that read back what they write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.updates import check_contract, quick, random_update, same, seeded

from unmask.defences import DEFENCES, parse_defence
from unmask.defences.table import written

each_kind = pytest.mark.parametrize(("name", "kind"), DEFENCES.items(), ids=DEFENCES)


@each_kind
def test_every_line_has_an_example_of_itself_and_a_promise_of_one_line(name, kind):
    assert parse_defence(kind.example).name == name
    assert kind.promise
    assert "\n" not in kind.promise


@each_kind
def test_every_example_defends_and_keeps_the_contract(name, kind):
    evidence, defence = random_update(), parse_defence(kind.example)
    after = defence(evidence, seeded())
    assert not same(after, evidence)
    assert same(after, defence(evidence, seeded()))
    if name != "withhold":
        check_contract(lambda e: defence(e, seeded()), evidence)


@each_kind
def test_every_setting_is_explained(name, kind):
    for setting in kind.settings:
        assert setting.name in str(setting)
        assert setting.expected in str(setting)
        assert setting.default is None or f"{written(setting.default)} unless given" in str(setting)


@quick
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_written_exactly(value):
    assert float(written(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), (1.0, "1"), (1e-4, "0.0001"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_values_are_written_shortly(value, text):
    assert written(value) == text
    assert written(("wte", "wpe")) == "wte+wpe"
