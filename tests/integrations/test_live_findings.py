"""The folder of an audit inside somebody else's program."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from unmask.audit.findings.finding import Finding
from unmask.audit.findings.folder import read_audit
from unmask.errors import InputError
from unmask.integrations.live_findings import LiveFindings, Program, name_model
from unmask.recovery import Status

PROGRAM = Program("trainer", "Trainer.train", logging.getLogger("unmask.test"))
SPEC = {"channel": "gradients", "model": "minilm-l6", "step": 1}


def keep(findings: LiveFindings) -> Finding:
    case = findings.new_case(SPEC)
    finding = Finding(case.id, case.spec, Status.PARTIAL.name, "a reason")
    findings.keep(finding, "unmask: step 1")
    return finding


def test_findings_are_kept_and_told(tmp_path, caplog):
    findings = LiveFindings(tmp_path / "a" / "b", PROGRAM)
    findings.open("minilm-l6", "f00")
    with caplog.at_level(logging.WARNING):
        finding = keep(findings)
    audit = read_audit(findings.folder)
    assert audit.findings == (finding,)
    assert (audit.manifest["engine"], audit.manifest["command"]) == ("trainer", "Trainer.train")
    assert audit.manifest["models"]["minilm-l6"]["fingerprint"] == "f00"
    assert "unmask: step 1: leaks (PARTIAL). a reason" in caplog.text


def test_the_same_case_again_is_a_further_exchange(tmp_path):
    findings = LiveFindings(tmp_path, PROGRAM)
    findings.open("minilm-l6")
    assert [keep(findings).case.get("exchange") for _ in range(2)] == [None, 2]
    later = LiveFindings(tmp_path, PROGRAM)
    later.open("minilm-l6")
    assert keep(later).case["exchange"] == 3


def test_a_folder_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1, "engine": "flower"}))
    with pytest.raises(InputError, match="audit of the engine 'flower'; choose another folder"):
        LiveFindings(tmp_path, PROGRAM).open("minilm-l6")


def test_a_finding_that_cannot_be_kept_is_a_line_in_the_log(tmp_path, caplog):
    findings = LiveFindings(tmp_path / "missing", PROGRAM)
    keep(findings)
    assert "the finding could not be kept" in caplog.text


def test_names_of_models(tiny_bert):
    assert name_model("minilm-l6") == "minilm-l6"
    assert name_model(Path("models/mine")) == "models/mine"
    assert name_model(tiny_bert) == name_model(tiny_bert.hf) == "BertForMaskedLM"
