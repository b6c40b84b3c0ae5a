from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from tests.report.findings import (
    HOSTILE,
    audit_of,
    failed,
    flower_finding,
    inconclusive,
    realistic,
    text_case,
    text_finding,
)

from unmask.audit.findings.verdict import reach_verdict
from unmask.report.sarif import render_sarif

LEAK = text_finding(text_case(), 1.0, 4)
NOTHING = text_finding(text_case(defences=["noise:sigma=0.1"]), 0.0)
UNCLEAR = inconclusive(text_case(protocol="lora:rank=8"))
FAILED = failed(text_case(batch_size=64))

# What SARIF 2.1.0 and GitHub's upload ask for, of what we write.
TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LOCATION = {
    "type": "object",
    "required": ["physicalLocation"],
    "properties": {
        "physicalLocation": {
            "type": "object",
            "required": ["artifactLocation", "region"],
            "properties": {
                "artifactLocation": {
                    "required": ["uri"],
                    "properties": {"uri": {"type": "string", "pattern": r"^[!-~]+$"}},
                },
                "region": {"required": ["startLine"], "properties": {"startLine": {"type": "integer", "minimum": 1}}},
            },
        }
    },
}
RESULT = {
    "type": "object",
    "required": ["ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints"],
    "properties": {
        "level": {"enum": ["none", "note", "warning", "error"]},
        "message": TEXT,
        "locations": {"type": "array", "minItems": 1, "items": LOCATION},
        "partialFingerprints": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}},
    },
}
RULE = {
    "type": "object",
    "required": ["id", "shortDescription", "fullDescription", "help"],
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "shortDescription": TEXT,
        "fullDescription": TEXT,
        "help": TEXT,
    },
}
SHAPE = {
    "type": "object",
    "required": ["version", "runs", "$schema"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "required": ["tool", "results"],
                "properties": {
                    "tool": {
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "required": ["name", "rules"],
                                "properties": {"rules": {"type": "array", "items": RULE}},
                            }
                        },
                    },
                    "results": {"type": "array", "items": RESULT},
                },
            },
        },
    },
}


def run(audit):
    document = json.loads(render_sarif(audit, reach_verdict(audit), Path("runs")))
    Draft202012Validator(SHAPE).validate(document)
    (found,) = document["runs"]
    rules = [rule["id"] for rule in found["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in found["results"])
    return found


def told(audit):
    return [(result["ruleId"], result["level"]) for result in run(audit)["results"]]


def test_the_level_says_how_bad_it_is():
    assert told(audit_of([LEAK, NOTHING, UNCLEAR, FAILED], ["no exact text"], [text_case(seed=6)])) == [
        ("no exact text", "error"),
        ("no exact text", "warning"),
        ("no exact text", "warning"),
        ("not-run", "warning"),
    ]
    assert told(audit_of([LEAK, NOTHING, UNCLEAR, FAILED])) == [
        ("leak-without-gate", "note"),
        ("inconclusive", "warning"),
        ("error", "warning"),
    ]


def test_a_result_stands_at_its_line_of_the_plan_and_is_known_again_by_its_finding():
    (result,) = run(audit_of([LEAK], ["no exact text"]))["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "plan.toml"}, "region": {"startLine": 12}}
    assert result["partialFingerprints"] == {"unmaskFinding/v1": LEAK.id, "primaryLocationLineHash": LEAK.id}


def test_two_cases_of_one_line_and_gate_are_two_alerts():
    other = text_finding(text_case(seed=1), 1.0, 4)
    results = run(audit_of([LEAK, other], ["no exact text"]))["results"]
    assert len({result["partialFingerprints"]["primaryLocationLineHash"] for result in results}) == 2


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("plans/a b.toml", "plans/a%20b.toml"),
        ("plän#1.toml", "pl%C3%A4n%231.toml"),
        ("/etc/p.toml", "file:///etc/p.toml"),
    ],
)
def test_the_plan_s_path_becomes_a_uri(path, uri):
    audit = audit_of([LEAK], ["no exact text"])
    audit.manifest["plan"]["path"] = path
    assert run(audit)["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


@pytest.mark.parametrize("line", [None, 0, -3, "12", True])
def test_a_result_without_a_line_still_has_a_place(line):
    audit = audit_of([LEAK], ["no exact text"])
    audit.manifest["cases"][0]["line"] = line
    assert run(audit)["results"][0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}


def test_a_live_federation_points_to_its_manifest():
    audit = replace(audit_of([flower_finding()]), manifest={})
    (result,) = run(audit)["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "manifest.json"


def test_success_and_exit_code():
    assert run(audit_of([LEAK], ["no exact text"]))["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]
    assert run(audit_of([FAILED]))["invocations"] == [{"executionSuccessful": False, "exitCode": 2}]


def test_a_whole_audit_and_hostile_text_keep_the_shape():
    run(audit_of(realistic(), ["no exact text", "rouge2 < 0.9"]))
    for text in HOSTILE:
        found = run(audit_of([replace(LEAK, reason=text, case=text_case(model=text))], ["no exact text"]))
        assert found["results"][0]["message"]["text"].isprintable()


def test_the_shape_can_be_missed():
    document = json.loads(render_sarif(audit := audit_of([LEAK]), reach_verdict(audit), Path("runs")))
    del document["runs"][0]["results"][0]["locations"]
    assert list(Draft202012Validator(SHAPE).iter_errors(document))
