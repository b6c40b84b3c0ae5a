"""Cases: the id is the hash of what is said, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.audit.made import spec

from unmask.audit.cases.case import Case, case_id


@given(order=st.permutations(list(spec())))
def test_the_order_of_keys_does_not_matter(order):
    said = spec()
    assert case_id({key: said[key] for key in order}) == case_id(said)


def test_the_id_of_a_case_stays_what_it_is():
    """Findings on disks are found by it: whoever changes it makes every audit run again."""
    assert case_id(spec()) == "4af2ac60ff45b08a"


@pytest.mark.parametrize("key", spec())
def test_every_field_changes_the_id(key):
    changed: Any = (
        {"name": "notes", "sha256": "cd" * 32} if key == "data" else ["int8"] if key == "defences" else "other"
    )
    assert case_id(spec(**{key: changed})) != case_id(spec())


def test_the_order_of_defences_matters():
    assert case_id(spec(defences=["a", "b"])) != case_id(spec(defences=["b", "a"]))


def test_numbers_and_texts_differ():
    assert case_id(spec(seed=1)) != case_id(spec(seed="1"))


def test_gates_and_line_are_no_part_of_the_id():
    assert Case(spec(), ("no exact text",), 7).id == Case(spec()).id


def test_what_json_cannot_say_is_no_case():
    with pytest.raises(ValueError, match="not JSON compliant"):
        case_id(spec(seed=float("nan")))


def test_seeds_of_cases_differ_and_fit_a_generator():
    seeds = {Case(spec(seed=seed)).seed for seed in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**48 for seed in seeds)
