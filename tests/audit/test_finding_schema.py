"""The published schema against findings, and against what is no finding."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from tests.audit.made import LOOKED
from tests.audit.made import finding as made
from tests.report.findings import (
    failed,
    flower_finding,
    inconclusive,
    query_finding,
    realistic,
    text_case,
    text_finding,
)

from unmask.audit.findings.finding import ERROR, SCHEMA, Finding, OpenPoint, TextPair
from unmask.channels import CHANNELS
from unmask.recovery import Aim, Status

PUBLISHED = json.loads((Path(__file__).parents[2] / "docs" / "finding.schema.json").read_text())
VALIDATOR = Draft202012Validator(PUBLISHED)


def document(finding: Finding = text_finding(text_case(), 0.5)):  # noqa: B008 (it is frozen)
    return json.loads(finding.to_json())


def test_the_schema_is_one():
    Draft202012Validator.check_schema(PUBLISHED)


def test_it_has_the_fields_and_the_statuses_of_the_code():
    assert set(PUBLISHED["properties"]) == {"digest", *(field.name for field in fields(Finding))}
    assert set(PUBLISHED["required"]) == set(PUBLISHED["properties"])
    assert set(PUBLISHED["properties"]["status"]["enum"]) == {*Status.__members__, ERROR}
    assert PUBLISHED["properties"]["schema"]["const"] == SCHEMA
    assert set(PUBLISHED["properties"]["case"]["properties"]["channel"]["enum"]) == set(CHANNELS)
    assert set(PUBLISHED["properties"]["looked_for"]["items"]["enum"]) == {aim.value for aim in Aim}


def test_every_property_says_what_it_is():
    assert [name for name, part in PUBLISHED["properties"].items() if "description" not in part] == []


@pytest.mark.parametrize(
    "finding",
    [
        *realistic()[:30],
        query_finding(1.0),
        flower_finding(),
        inconclusive(text_case()),
        failed(text_case()),
        replace(text_finding(text_case(), 0.5), metrics={"epsilon": math.inf}),
        made(texts=(TextPair(None, None, ambiguities=(OpenPoint("equal_tokens", "alike", 1, ("a",)),)),), **LOOKED),
    ],
    ids=lambda finding: finding.id,
)
def test_findings_keep_it(finding):
    VALIDATOR.validate(document(finding))


@pytest.mark.parametrize("name", sorted(PUBLISHED["properties"]))
def test_a_missing_field_is_seen(name):
    broken = document()
    del broken[name]
    assert list(VALIDATOR.iter_errors(broken))


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"schema": 1},
        {"looked_for": ["everything"]},
        {"control": {}},
        {"digest": "x"},
        {"status": "SAFE"},
        {"status": "ERROR"},
        {"error": {"type": "x", "message": "y", "traceback": "z"}},
        {"metrics": {"token_recall": "much"}},
        {"case": {"channel": "gossip"}},
        {"case": {}},
        {"tokens": [["piece", "maybe"]]},
        {"tokens": [["piece"]]},
        {"texts": [{"true": None, "recovered": None, "certain": True, "exact": True, "count": 1}]},
        {"cost": {"queries": 1.5}},
    ],
    ids=str,
)
def test_a_wrong_field_is_seen(change):
    assert list(VALIDATOR.iter_errors({**document(), **change}))
