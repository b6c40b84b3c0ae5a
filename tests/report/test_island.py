from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.report.findings import HOSTILE, audit_of, failed, flower_finding, inconclusive, text_case, text_finding

from unmask.audit.verdict import reach_verdict
from unmask.report.island import as_script, island
from unmask.report.page import rows


def build(findings, gates=(), show=False):
    audit = audit_of(findings, gates)
    verdict = reach_verdict(audit)
    return island(audit, verdict, Path("runs/x"), rows(audit, verdict), show)


def test_a_script_element_cannot_be_left():
    for text in (*HOSTILE, "\u2028\u2029"):
        script = str(as_script({"x": text}))
        assert script.isascii()
        assert not set("<>&") & set(script)
        assert json.loads(script) == {"x": text}


def test_a_finding_has_everything_that_its_panel_shows():
    document = build(
        [text_finding(text_case(), 1.0, 4), text_finding(text_case(defences=["int8"]), 0.3)], ["no exact text"]
    )
    first = document["findings"][0]
    assert first["gates"] == [["no exact text", "crossed"]]
    assert first["command"] == f"unmask audit plan.toml --out runs/x --case {first['id']}"
    assert first["stops"] == [(1, "int8", "reduced to 30 % of tokens")]
    assert first["certificate"]["holds"] is True
    assert {name: value for name, value, _ in first["metrics"]}["token_recall"] == "100 %"
    assert {name: chance for name, _, chance in first["metrics"]}["token_recall"] == "6 %"
    assert document["strings"][first["used"]].startswith("model.layers.0.self_attn.q_proj.weight, ")
    assert document["threats"][first["threat"]]["who"].startswith("A federated-learning server")
    assert first["status"] in document["meanings"]


def test_what_could_not_tell_is_not_called_stopped():
    document = build([text_finding(text_case(), 1.0, 4), inconclusive(text_case(protocol="lora:rank=8"))])
    assert document["findings"][0]["stops"] == [(1, "lora:rank=8", "the attack could not tell, which is not 'stopped'")]


def test_long_texts_that_are_shared_are_kept_once():
    document = build([text_finding(text_case(seed=seed), 0.5) for seed in range(50)])
    assert len(document["strings"]) <= 4


def test_a_live_federation_has_no_command_and_no_score():
    audit = replace(audit_of([flower_finding()]), manifest={"schema": 1})
    verdict = reach_verdict(audit)
    (finding,) = island(audit, verdict, Path("runs"), rows(audit, verdict), False)["findings"]
    assert finding["command"] is None
    assert finding["metrics"] == []
    assert finding["bag"]["marks"] == "b" * 11


def test_an_error_is_told_without_its_traceback_unless_secrets_are_shown():
    document = build([failed(text_case())])
    assert "traceback" not in document["findings"][0]
    assert "out of memory" not in str(document)
    assert build([failed(text_case())], show=True)["findings"][0]["traceback"][-1] == "RuntimeError: out of memory"


def test_every_text_of_a_hostile_finding_is_harmless():
    for text in HOSTILE:
        finding = text_finding(text_case(model=text, data={"name": text, "sha256": text}), 0.5)
        finding = replace(
            finding, reason=text, used=(text,), certificate={"claim": text, "residual": text, "holds": text}
        )
        assert all(_is_visible(part) for part in _texts(build([finding], show=True)))


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _is_visible(text):
    return text.isprintable()
