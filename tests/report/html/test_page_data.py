from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.report.findings import HOSTILE, audit_of, failed, flower_finding, inconclusive, text_case, text_finding

from unmask.audit.findings.verdict import reach_verdict
from unmask.report.html.page_data import as_script, page_data
from unmask.report.html.render import render_html
from unmask.report.junit import render_junit
from unmask.report.markdown import render_markdown
from unmask.report.page import rows
from unmask.report.sarif import render_sarif


def build(findings, gates=(), show=False):
    audit = audit_of(findings, gates)
    verdict = reach_verdict(audit)
    return page_data(audit, verdict, Path("runs/x"), rows(audit, verdict), show)


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
    ((gate, ruling, why),) = first["gates"]
    assert (gate, ruling, document["strings"][why]) == ("no exact text", "crossed", "exact_texts = 4")
    assert document["strings"][first["looked_for"]] == "tokens and whole texts."
    assert "control" not in first
    assert "without protection" in document["strings"][document["findings"][1]["control"]]
    assert first["command"] == f"unmask audit plan.toml --out runs/x --case {first['id']}"
    assert first["stops"] == [(1, "int8", "reduced to 30 % of tokens, 0 exact")]
    assert first["certificate"]["word"] == "It holds."
    assert {name: value for name, value, _ in first["metrics"]}["token_recall"] == "100 %"
    assert {name: chance for name, _, chance in first["metrics"]}["token_recall"] == "6 %"
    assert document["strings"][first["used"]].startswith("model.layers.0.self_attn.q_proj.weight, ")
    assert document["threats"][first["threat"]]["who"].startswith("A federated-learning server")
    assert first["status"] in document["meanings"]


def test_what_could_not_tell_is_not_called_stopped():
    document = build([text_finding(text_case(), 1.0, 4), inconclusive(text_case(protocol="lora:rank=8"))])
    assert document["findings"][0]["stops"] == [(1, "lora:rank=8", "inconclusive, which does not count as 'stopped'")]


def test_stopped_in_some_seeds_is_not_stopped():
    noise = ["noise:sigma=0.001"]
    found = [text_finding(text_case(seed=seed), 1.0, 4) for seed in (0, 1)]
    found += [
        text_finding(text_case(seed=0, defences=noise), 0.0),
        text_finding(text_case(seed=1, defences=noise), 1.0),
    ]
    document = build(found)
    words = "stopped in 1 of 2 seeds, which does not count as 'stopped'"
    assert [one["stops"] for one in document["findings"][:2]] == [
        [(place, "noise:sigma=0.001", words)] for place in (2, 3)
    ]


def test_a_certificate_without_a_residual_certifies_nothing():
    leak = text_finding(text_case(), 0.5)
    words = []
    for residual in (None, 0.5):
        one = replace(leak, certificate={**leak.certificate, "residual": residual, "holds": False})
        words.append(build([one])["findings"][0]["certificate"]["word"])
    assert words == ["There is no certificate.", "It does not hold."]


def test_a_leak_that_nothing_proves_is_called_a_guess():
    document = build([text_finding(text_case(), 1.0, 4, status="NOTHING_FOUND"), text_finding(text_case(seed=1), 1.0)])
    first, second = document["findings"]
    assert document["strings"][first["note"]] == "The adversary cannot prove it, but its guesses are right."
    assert "note" not in second


def test_odd_findings_do_not_end_the_report():
    """What `Finding.from_json` refuses today, and an older or newer one may let through."""
    leak = text_finding(text_case(), 1.0, 4)
    odd = [
        replace(leak, case=text_case(defences=None)),
        replace(leak, case=text_case(defences=[["a"]])),
        replace(leak, case=text_case(seed=[1], task=["x"], batch_size={})),
        replace(leak, certificate={"claim": "x", "details": [1]}),
        replace(leak, status="ERROR", error="held"),
        replace(leak, metrics={"token_recall": 10**400, "exact_texts": 10**400}),
    ]
    for finding in odd:
        audit = audit_of([finding])
        for render in (render_html, render_markdown, render_junit, render_sarif):
            assert render(audit, reach_verdict(audit), Path("runs"))


def test_long_texts_that_are_shared_are_kept_once():
    document = build([text_finding(text_case(seed=seed), 0.5) for seed in range(50)])
    assert len(document["strings"]) <= 4


def test_a_live_federation_has_no_command_and_no_score():
    audit = replace(audit_of([flower_finding()]), manifest={"schema": 1})
    verdict = reach_verdict(audit)
    (finding,) = page_data(audit, verdict, Path("runs"), rows(audit, verdict), False)["findings"]
    assert finding["command"] is None
    assert finding["metrics"] == []
    assert finding["stops"] is None  # nobody knows what the client did
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
