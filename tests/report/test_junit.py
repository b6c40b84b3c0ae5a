from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from tests.report.findings import (
    HOSTILE,
    audit_of,
    failed,
    inconclusive,
    query_finding,
    realistic,
    text_case,
    text_finding,
)

from unmask.audit.findings.verdict import reach_verdict
from unmask.report.junit import render_junit

LEAK = text_finding(text_case(), 1.0, 4)
NOTHING = text_finding(text_case(defences=["noise:sigma=0.1"]), 0.0)
UNCLEAR = inconclusive(text_case(protocol="lora:rank=8"))
FAILED = failed(text_case(batch_size=64), "InputError", "text 3 has no tokens")


def suite(findings, gates=(), missing=()):
    audit = audit_of(findings, gates, missing)
    root = ElementTree.fromstring(render_junit(audit, reach_verdict(audit), Path("runs")).encode())
    assert root.tag == "testsuites"
    return root.find("testsuite")


def kinds(found):
    return [next((node.tag for node in case if node.tag != "system-out"), "passed") for case in found]


def test_one_test_for_each_finding_and_gate():
    found = suite(
        [LEAK, NOTHING, UNCLEAR, FAILED, query_finding(1.0)], ["no exact text", "exact_texts < 3"], [text_case(seed=8)]
    )
    assert kinds(found.findall("testcase")) == [
        *("failure", "failure"),  # LEAK
        *("passed", "passed"),  # NOTHING
        *("error", "error"),  # UNCLEAR: a gate that is inconclusive is not passed
        *("error", "error"),  # FAILED
        "passed",  # no gate concerns queries
        "error",  # not run, and under a gate
    ]
    counted = {name: found.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": "10", "failures": "2", "errors": "5", "skipped": "0"}
    kinds_of_error = [node.get("type") for node in found.findall("testcase/error")]
    assert kinds_of_error == ["inconclusive", "inconclusive", "error", "error", "inconclusive"]


def test_why_is_said():
    found = suite([LEAK, UNCLEAR, FAILED], ["no exact text"])
    assert "'no exact text' is crossed" in found.find("testcase/failure").get("message")
    unclear, failed = found.findall("testcase/error")
    assert "is inconclusive" in unclear.get("message")
    assert "no direction of the gradients" in unclear.get("message")
    assert "the attack did not apply or did not finish" in unclear.get("message")
    assert failed.get("message") == "InputError: text 3 has no tokens"


def test_without_a_gate_what_could_not_tell_is_skipped_and_a_leak_passes_with_its_words():
    found = suite([LEAK, UNCLEAR], missing=[text_case(seed=8)])
    assert kinds(found.findall("testcase")) == ["passed", "skipped", "skipped"]
    assert found.find("testcase/system-out").text.startswith("leaks: 100 % of tokens")


def test_names_are_unique_and_time_is_counted_once():
    found = suite(realistic(), ["no exact text", "exact_texts < 9"])
    names = [(case.get("classname"), case.get("name")) for case in found.findall("testcase")]
    assert len(names) == len(set(names))
    seconds = sum(finding.run.get("seconds", 0) for finding in realistic())
    assert abs(float(found.get("time")) - seconds) < 0.1


def test_characters_that_xml_refuses_do_not_break_it():
    for text in HOSTILE:
        found = suite([replace(LEAK, reason=text, case=text_case(model=text))], ["no exact text"])
        assert found.find("testcase/failure").text.isprintable() is False  # it has one line end
        assert all(line.isprintable() for line in found.find("testcase/failure").text.split("\n"))
