from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.report.findings import audit_of, failed, inconclusive, query_finding, text_case, text_finding

from unmask.audit.findings.folder import Audit
from unmask.audit.findings.verdict import reach_verdict
from unmask.metrics import METRICS
from unmask.report import page
from unmask.report.html.render import render_html
from unmask.report.markdown import render_markdown

LEAK = text_finding(text_case(), 1.0, 4)
NOTHING = text_finding(text_case(defences=["noise:sigma=0.1"]), 0.0)
UNCLEAR = inconclusive(text_case(protocol="lora:rank=8"))
FAILED = failed(text_case(batch_size=64))


def kind(findings, gates=(), missing=()):
    return page.hero(reach_verdict(audit_of(findings, gates, missing))).kind


def test_the_face_of_every_verdict():
    gate = ["no exact text"]
    assert kind([NOTHING], gate) == "held"
    assert kind([LEAK, NOTHING], gate) == "crossed"
    assert kind([FAILED], gate) == "error"
    assert kind([UNCLEAR, NOTHING], gate) == "unclear"
    assert kind([NOTHING], gate, [text_case(seed=7)]) == "unclear"
    assert kind([LEAK]) == "neutral"
    assert kind([UNCLEAR]) == "unclear"


def test_green_only_where_no_case_is_inconclusive():
    audit = audit_of([NOTHING, UNCLEAR], ["no exact text"])
    cases = [{**case, "gates": case["gates"] if case["id"] == NOTHING.id else []} for case in audit.planned]
    face = page.hero(reach_verdict(replace(audit, manifest={**audit.manifest, "cases": cases})))
    assert (face.kind, face.word) == ("neutral", "No gate crossed")
    assert "1 case is inconclusive." in face.note


def test_gates_that_need_no_attack_are_not_said_to_hold_against_one():
    private = replace(NOTHING, metrics={**NOTHING.metrics, "epsilon": 1.0, "cosine": 0.5})
    unclear = replace(private, status="NOT_APPLICABLE")
    for metric in [name for name, metric in METRICS.items() if metric.is_proven]:
        gate = f"{metric} < {private.metrics[metric] + 0.1}"
        assert page.hero(reach_verdict(audit_of([private], [gate]))).note.startswith("Every gate of the plan is about")
        assert reach_verdict(audit_of([unclear], [gate])).exit_code == 0
    mixed = page.hero(reach_verdict(audit_of([private], ["epsilon < 2", "no exact text"]))).note
    assert "the others against these attacks" in mixed
    crossed = page.hero(reach_verdict(audit_of([private], ["epsilon < 0.5"]))).note
    assert "leaks" not in crossed


def test_an_audit_without_gates_never_looks_passed():
    assert page.hero(reach_verdict(audit_of([NOTHING]))).word == "No gate set"


def test_gates_name_the_findings_that_crossed_them():
    audit = audit_of([NOTHING, LEAK, UNCLEAR], ["exact_texts < 9", "no exact text"])
    lines = page.gate_lines(reach_verdict(audit), {finding.id: place for place, finding in enumerate(audit.findings)})
    assert [(line.text, line.ruling) for line in lines] == [
        ("no exact text", "crossed"),
        ("exact_texts < 9", "inconclusive"),
    ]
    assert lines[0].counts == {"crossed": 1, "inconclusive": 1, "held": 1}
    assert [(named.place, named.id) for named in lines[0].named] == [(1, LEAK.id)]
    assert lines[0].named[0].why == ""
    assert lines[1].named[-1].why == "the attack did not apply or did not finish (NOT_APPLICABLE)"
    assert UNCLEAR.id in [named.id for named in lines[1].named]


def test_an_open_gate_says_why_on_the_page():
    """Under noise the order of tokens was not tried."""
    bag = text_finding(text_case(defences=["int8"]), 0.6, looked_for=("tokens",))
    audit = audit_of([bag], ["no near-exact text", "token_recall < 0.7"])
    verdict = reach_verdict(audit)
    assert page.hero(verdict).kind == "unclear"
    out = render_html(audit, verdict, Path("x"))
    assert "stopped early, or could not confirm its result" in out
    assert "The attack did not test their order" in out
    assert "without protection the same attack ended as RECOVERED: 100 % of tokens, 4 exact." in out


def test_a_gate_crossed_by_many_names_some_and_counts_the_rest():
    audit = audit_of([text_finding(text_case(seed=seed), 1.0, 4) for seed in range(60)], ["no exact text"])
    (line,) = page.gate_lines(reach_verdict(audit), {finding.id: 0 for finding in audit.findings})
    assert (len(line.named), line.num_more) == (page.MAX_NAMED, 60 - page.MAX_NAMED)


def test_rows_say_what_leaked_and_sort_what_is_not_known_apart():
    audit = audit_of([LEAK, NOTHING, UNCLEAR, FAILED, query_finding(1.0)], ["no exact text"])
    rows = page.rows(audit, reach_verdict(audit))
    assert [row.leak for row in rows] == [
        *("100 % of tokens, 4 exact", "0 % of tokens", "inconclusive", "not measured", "100 % of weights")
    ]
    assert [row.order[1] for row in rows] == [1.0, 0.0, -1.0, -1.0, 1.0]
    assert [row.order[0] for row in rows] == [0.0, 3.0, 2.0, 1.0, 0.0]
    assert [row.gate for row in rows] == ["crossed", "held", "inconclusive", "inconclusive", "no gate"]


def test_the_summary_counts_every_case_once():
    audit = audit_of([LEAK, NOTHING, UNCLEAR, FAILED, query_finding(1.0)], missing=[text_case(seed=5)])
    assert page.summary(audit) == [
        ("gradients", "smollm2-135m", {"LEAK": 1, "NO_LEAK": 1, "INCONCLUSIVE": 1, "ERROR": 1, "MISSING": 1}),
        ("queries", "smollm2-135m", {"LEAK": 1, "NO_LEAK": 0, "INCONCLUSIVE": 0, "ERROR": 0, "MISSING": 0}),
    ]
    assert page.missing_cases(audit)[0][1].endswith("seed 5")
    assert page.failed_cases(audit)[0][0].id == FAILED.id


def test_the_manifest_is_shown_without_its_cases():
    tables = dict(page.manifest_tables(audit_of([LEAK]).manifest, show=True))
    assert ("notes / sha256", "ab" * 32) in tables["Data"]
    assert ("engine", "local") in tables["Run"]
    assert ("smollm2-135m / files / model.safetensors", "0d" * 32) in tables["Models"]
    assert "Cases" not in tables


def test_a_redacted_manifest_names_no_people_no_machine_and_no_data():
    manifest = {
        **audit_of([LEAK]).manifest,
        "host": "anns-laptop",
        "command": "unmask audit '/home/ann lee/plan.toml' --out=/srv/ann/runs -o /srv/ann/x",
        "plan": {"path": "/home/ann lee/plan.toml", "sha256": "c4" * 32, "title": "T"},
        "models": {"/srv/ann/mine": {"files": {"model.safetensors": "0d" * 32}}},
        "data": {"notes": {"sha256": "ab" * 32, "num_texts": 2, "path": "/home/ann lee/texts.txt"}},
    }
    tables = dict(page.manifest_tables(manifest, show=False))
    assert not [word for word in ("ann", "lee", "srv", "abab") if word in str(tables)]
    assert ("command", "unmask audit …/plan.toml --out=…/runs -o …/x") in tables["Run"]
    assert ("…/mine / files / model.safetensors", "0d" * 32) in tables["Models"]
    assert tables["Data"] == [("notes / num_texts", "2"), ("notes / path", "…/texts.txt")]


def test_findings_of_another_version_are_told():
    old = [replace(LEAK, id=f"{number}", run={"unmask": "0.0.9"}) for number in range(2)]
    audit = audit_of([*old, replace(NOTHING, run={"unmask": "0.1.0"})])
    assert page.other_versions(audit) == [("0.0.9", 2)]
    assert "2 finding(s) were made by unmask `0.0.9`" in render_markdown(audit, reach_verdict(audit), Path("x"))
    assert "2 findings were made by unmask 0.0.9" in render_html(audit, reach_verdict(audit), Path("x"))


def test_an_empty_audit_has_a_page():
    empty = Audit({}, ())
    assert page.rows(empty, reach_verdict(empty)) == []
    assert page.summary(empty) == []
